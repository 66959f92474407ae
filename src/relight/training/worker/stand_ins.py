"""Values for what an interrupted block has not set, until the step is computed again.

Code after the block runs also after an interrupted attempt, and reads what the block sets: `total += loss.item()`. In
the first step of a job, or of a function that each epoch calls, nothing has set `loss` before, and a list to which the
block appends is empty; later, what an earlier block has set may not fit to a batch of another size. Python would raise
an exception that the script does not have, in all survivors at once. What such code changes is undone.
"""

import ast
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from relight.training.carried.code import source
from relight.training.carried.finding.places import locals_of, set_local
from relight.training.carried.finding.spots.spot import MISSING, AttributeSpot, DictSpot, Spot
from relight.training.worker.stand_in import StandIn

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
_APPEND = ("append", "appendleft", "extend")


class StandIns:
    """Sets them where a block was interrupted, and takes them out when the loop asks for the step again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, frame: FrameType, *, all_names: bool = False) -> None:
        """Set what the block of `with step` in this frame sets, and what has no value yet.

        `all_names`: also the names that have one, as they do not fit to the batch of this attempt.
        """
        if not source.is_user_frame(frame):
            return
        node = source.node_of(frame.f_code)
        way = source.way_to(source.body_of(node), source.position_of(frame))
        block = way[-1][0][way[-1][1]] if way else None
        if not isinstance(block, ast.With):
            return
        names = _Names(frame)
        for inner in (part for statement in block.body for part in _in_scope(statement)):
            if isinstance(inner, ast.AugAssign):
                self._stand_for(names.spot(inner.target), lambda now: _is_unset(now) or _is_zero(now))
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                self._stand_for(names.spot(inner), lambda now: all_names or _is_unset(now))
            elif isinstance(inner, (ast.Attribute, ast.Subscript)) and isinstance(inner.ctx, ast.Store):
                self._stand_for(names.spot(inner), _is_unset)
            elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _APPEND:
                self._append_to(names.value(inner.func.value))

    def drop(self) -> None:
        """Put back what was there, where no code has set something else since."""
        while self._undo:
            self._undo.pop()()

    def _stand_for(self, spot: Spot | None, is_needed: Callable[[Any], bool]) -> None:
        if spot is None or isinstance(before := spot.get(), StandIn) or not is_needed(before):
            return

        def put_back() -> None:
            if isinstance(spot.get(), StandIn):
                spot.set(before)

        spot.set(StandIn(1.0))
        self._undo.append(put_back)

    def _append_to(self, values: Any) -> None:
        if type(values) not in (list, deque) or values:
            return

        def remove() -> None:
            kept = [one for one in values if not isinstance(one, StandIn)]
            if len(kept) < len(values):
                values.clear()
                values.extend(kept)

        values.append(StandIn(1.0))
        self._undo.append(remove)


class _Names:
    """The names that a frame sees, and what is reached from them without code of the script's."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        code = frame.f_code
        self._own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}

    def spot(self, node: ast.expr) -> Spot | None:
        """Return the place that an expression names; None: it cannot be told, or is watched otherwise."""
        if isinstance(node, ast.Name):
            is_local = node.id in self._own or self._frame.f_locals is self._frame.f_globals
            return _Local(self._frame, node.id) if is_local else DictSpot(self._frame.f_globals, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            is_else = isinstance(owner, (type, nn.Module, Optimizer, StandIn)) or not _takes_any(owner, node.attr)
            return None if is_else else AttributeSpot(owner, node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = self.value(node.value)
            return _Item(owner, node.slice.value) if isinstance(owner, dict) else None
        return None

    def value(self, node: ast.expr) -> Any:
        """Return what an expression stands for; `MISSING`: it cannot be told."""
        if (spot := self.spot(node)) is None:
            return MISSING
        return spot.get()


class _Local(Spot):
    """A local of a running function, or a name of a running module."""

    def __init__(self, frame: FrameType, name: str) -> None:
        self._frame, self._name = frame, name

    def get(self) -> Any:
        return locals_of(self._frame).get(self._name, MISSING)

    def set(self, value: Any) -> None:
        set_local(self._frame, self._name, value)


class _Item(DictSpot):
    """An item of a dictionary, which reading does not make (`defaultdict`)."""

    def get(self) -> Any:
        return dict.get(self._names, self._name, MISSING)


def _takes_any(owner: Any, name: str) -> bool:
    """Return whether the attribute is a plain entry, and no setter refuses a value (`p.grad`, frozen classes)."""
    of_class = inspect.getattr_static(type(owner), name, None)
    is_set_plainly = inspect.getattr_static(type(owner), "__setattr__") is object.__setattr__
    return hasattr(owner, "__dict__") and is_set_plainly and not hasattr(type(of_class), "__set__")


def _is_unset(value: Any) -> bool:
    return value is MISSING or value is None


def _is_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of this code that run in its own scope."""
    if isinstance(node, _OTHER_SCOPES):
        return
    yield node
    for inner in ast.iter_child_nodes(node):
        yield from _in_scope(inner)
