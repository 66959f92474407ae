"""Values for names that an interrupted block has not set, until the step is computed again.

Code after the block runs also after an interrupted attempt, and reads what the block sets: `total += loss.item()`. In
the first step of a job, or of a function that each epoch calls, nothing has set `loss` before: Python would raise
UnboundLocalError, and the job would end by an error that the script does not have. What such code changes is undone.
"""

import ast
from collections.abc import Iterator
from types import FrameType
from typing import Any

from relight.training.carried.code import source
from relight.training.carried.finding.places import locals_of, set_local
from relight.training.carried.finding.spots.spot import MISSING

_OTHER_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_ARE_FALSE = ("isnan", "isinf")  # 0.0, for checks that end a job


class StandIn(float):
    """1.0, for which all attributes, items and results of torch's functions stand too: `value.argmax(1)[0].item()`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of Python and NumPy
            raise AttributeError(name)
        return StandIn(0.0) if name in _ARE_FALSE else self

    def __call__(self, *_: Any, **__: Any) -> "StandIn":
        return self

    def __getitem__(self, _: Any) -> "StandIn":
        return self

    def __len__(self) -> int:
        return 1  # a mean is divided by it

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __index__(self) -> int:
        return 0

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        """Stand for the result too."""
        return cls(0.0 if getattr(function, "__name__", "") in _ARE_FALSE else 1.0)


class StandIns:
    """Sets them in the frame of a block, and takes them out when the loop asks for the step again."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._names: tuple[str, ...] = ()

    def set(self, frame: FrameType) -> None:
        """Set all names that the block of `with step` in this frame sets, and that are not set yet."""
        if not source.is_user_frame(frame):
            return
        node = source.node_of(frame.f_code)
        way = source.way_to(source.body_of(node), source.position_of(frame))
        block = way[-1][0][way[-1][1]] if way else None
        if not isinstance(block, ast.With):
            return
        names = {name for statement in block.body for name in _set_by(statement)}
        self._names = tuple(sorted(names - locals_of(frame).keys()))
        self._frame = frame
        for name in self._names:
            set_local(frame, name, StandIn(1.0))

    def drop(self) -> None:
        """Unset those that are still there."""
        if self._frame is None:
            return
        found = locals_of(self._frame)
        for name in [name for name in self._names if isinstance(found.get(name), StandIn)]:
            set_local(self._frame, name, MISSING)
        self._frame, self._names = None, ()


def _set_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that this code sets in its own scope."""
    if isinstance(node, _OTHER_SCOPES):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    for inner in ast.iter_child_nodes(node):
        yield from _set_by(inner)
