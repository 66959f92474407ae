"""A value for a name that an interrupted block has not set, as code after the block uses it."""

import ast
import dis
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from relight.training.carried.code import source

_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "isclose", "allclose", "equal", "array_equal")
_ARE_FALSE = frozenset({"isnan", "isinf", *_COMPARE, *(f"__{name}__" for name in _COMPARE)})
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


class StandIn(float):
    """1.0, for which all attributes, items and results of functions stand too: `value.argmax(1)[0].item()`.

    Comparisons with it are false, so that no code acts on it (`if loss < target: break`), but true in an `assert`.
    It unpacks into as many as are asked for, and has no items for a loop.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of Python and NumPy
            raise AttributeError(name)
        return StandIn(0.0) if name in _ARE_FALSE else self

    def __call__(self, *_: Any, **__: Any) -> "StandIn":
        return self

    def __getitem__(self, _: Any) -> "StandIn":
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        """Change nothing."""

    def __len__(self) -> int:
        return 1  # a mean is divided by it

    def __iter__(self) -> Iterator[Any]:
        return iter((self,) * _unpacked_by(sys._getframe(1)))

    def __index__(self) -> int:
        return 0

    def __format__(self, how: str) -> str:
        try:
            return super().__format__(how)
        except ValueError:  # of a whole number, or of a text
            return str(int(self)).__format__("") if how[-1:] != "s" else str(self).__format__(how)

    __hash__ = float.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        """Stand for the result too."""
        return _result(getattr(function, "__name__", ""), sys._getframe(1))

    def __array_function__(self, function: Any, *_: Any) -> Any:
        """Stand for the result of a function of NumPy's."""
        return _result(getattr(function, "__name__", ""), sys._getframe(1))


def _compare(_: StandIn, __: object) -> StandIn:
    return StandIn(_is_asserted(sys._getframe(1)))


def _arithmetic(name: str) -> Any:
    method = getattr(float, name)

    def compute(self: StandIn, *others: Any) -> Any:
        try:
            found = method(self, *others)
        except ZeroDivisionError:
            found = 0.0
        return StandIn(found) if isinstance(found, float) else found

    return compute


for _name in _COMPARE[:6]:
    setattr(StandIn, f"__{_name}__", _compare)
for _name in (*(f"__{way}{name}__" for name in _ARITHMETIC for way in ("", "r")), "__neg__", "__pos__", "__abs__"):
    setattr(StandIn, _name, _arithmetic(_name))


def _result(name: str, frame: FrameType) -> StandIn:
    return StandIn(name not in _ARE_FALSE or (name not in ("isnan", "isinf") and _is_asserted(frame)))


def _is_asserted(frame: FrameType) -> bool:
    """Return whether a frame evaluates an `assert`."""
    way = source.way_to(source.body_of(source.node_of(frame.f_code)), source.position_of(frame))
    return bool(way) and isinstance(way[-1][0][way[-1][1]], ast.Assert)


def _unpacked_by(frame: FrameType) -> int:
    """Return how many values the instruction that a frame is at unpacks; 0: it does something else."""
    at = next((one for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti), None)
    if at is None or at.arg is None:
        return 0
    if at.opname == "UNPACK_EX":
        return (at.arg & 0xFF) + (at.arg >> 8)
    return at.arg if at.opname.startswith("UNPACK_SEQUENCE") else 0
