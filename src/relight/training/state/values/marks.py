"""Values as they were: remembered, compared and put back.

A value is remembered with the identity of everything in it that can change, so that putting it back leaves every other
name of the same object right.
"""

import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from relight.training.state.values.bits import same_bits
from relight.training.state.values.cells import cells_state, set_cells_state
from relight.training.state.values.generators import (
    generator_state,
    same_state,
    set_generator_state,
    set_stream_state,
    stream_state,
)
from relight.training.state.values.kinds import (
    PLAIN,
    attributes_beside,
    attributes_of,
    base_of,
    fill,
    items_of,
    kind_of,
    members_in,
    refill,
)
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.tensors import version_of
from relight.transfer.io.codec import local_part
from relight.transfer.io.strides import overlaps, with_strides

DEEPEST = 12
SEEN_ONLY = frozenset({"opaque", "digest"})  # marks of values that are not put back
LONG = 256  # members of a list of which only the end is compared, if it only grows
_BESIDE = frozenset({"tensor", "list", "deque", "dict", "set"})
_SECOND = operator.itemgetter(1)


class Mark:
    """A value that can change, as it was: its kind, itself, a copy of what it held, and of attributes beside that.

    The copy of a dict is a list of items, or a dict if it is one of Python's own with nothing but plain values.
    """

    __slots__ = ("attributes", "kind", "saved", "value")

    def __init__(self, kind: str, value: Any, saved: Any, attributes: dict[str, Any] | None = None) -> None:
        self.kind = kind
        self.value = value
        self.saved = saved
        self.attributes = attributes

    @property
    def items(self) -> Iterable[tuple[Any, Any]]:
        """Keys and remembered values of a dict."""
        return self.saved.items() if isinstance(self.saved, dict) else self.saved


def remember(
    value: Any,
    *,
    grows: bool = False,
    members_stay: bool = False,
    is_part: Callable[[Any], bool] = lambda _: False,
    depth: int = 0,
    seen: dict[int, int] | None = None,
) -> Any:
    """A value as it is now. What cannot change is its own memory.

    `grows`: long lists only get more members; what these hold may change, unless `members_stay`. `is_part`: of a value
    that is put back otherwise: here it only matters that it is this one. `seen`: the depths at which values were met,
    by `id`: contents are remembered once.
    """
    if type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value))):
        return value
    if seen is None and type(value) is dict:  # the quick way, for what most scripts count in
        words = value.copy()
        if PLAIN.issuperset(map(type, words.values())) and not is_part(value):
            return Mark("dict", value, words, {})
    kind = kind_of(value)
    if kind in ("plain", "number"):
        return value
    seen = {} if seen is None else seen
    if seen.get(id(value), DEEPEST + 1) <= depth:
        return Mark("opaque", value, None)
    seen[id(value)] = depth

    def inside(one: Any) -> Any:
        return remember(one, grows=grows, members_stay=members_stay, is_part=is_part, depth=depth + 1, seen=seen)

    if kind == "opaque" or depth > DEEPEST or (kind in ("tensor", "list", "dict", "object") and is_part(value)):
        return Mark("opaque", value, None)
    beside = {name: inside(one) for name, one in attributes_beside(value).items()} if kind in _BESIDE else None
    if kind == "tensor":
        gradient = gradient_of(value)
        own = None if gradient is None else Mark("tensor", gradient, (*_state_of(gradient), None))
        return Mark(kind, value, (*_state_of(value), own), beside)
    if grows and type(value) is list and len(value) > LONG and (members_stay or all(map(_is_fixed, value[-LONG:]))):
        return Mark("growing", value, len(value))
    if kind in ("list", "deque", "set", "tuple", "objects"):
        members = members_in(kind, value)
        is_plain = PLAIN.issuperset(map(type, members))
        return Mark(kind, value, members if is_plain else [inside(one) for one in members], beside)
    if kind == "dict":
        table = value.copy() if type(value) is dict else None
        items = items_of(value) if table is None else list(table.items())
        if not PLAIN.issuperset(map(type, map(_SECOND, items))):
            return Mark(kind, value, [(key, inside(one)) for key, one in items], beside)
        return Mark(kind, value, items if table is None else table, beside)
    if kind == "object":
        return Mark(kind, value, {name: inside(one) for name, one in attributes_of(value).items()})
    if kind == "generator":
        return Mark(kind, value, generator_state(value))
    if kind == "stream":
        return Mark(kind, value, stream_state(value))
    if kind == "cells":
        return Mark(kind, value, cells_state(value))
    return Mark(kind, value, value[:] if type(value) is array else value.copy())  # arrays and bytes


def _is_fixed(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and PLAIN.issuperset(map(type, value)))


def changed(mark: Any, value: Any) -> bool:
    """Return whether `value` is not what was remembered: another object, or other contents."""
    if type(mark) is not Mark:
        if mark is value:
            return False
        if type(mark) is not type(value) or type(mark) is tuple:
            return True
        if type(mark) is float and mark != 0.0 and mark == mark:  # noqa: PLR0124
            return bool(mark != value)
        if isinstance(mark, (float, complex)) or hasattr(mark, "dtype"):  # -0.0 is another one than 0.0
            return repr(mark) != repr(value)
        return bool(mark != value)
    if mark.value is not value:
        return True
    kind, saved = mark.kind, mark.saved
    if type(saved) is dict and type(value) is dict:  # the quick way, of plain values
        if len(value) != len(saved):
            return True
        if all(map(operator.is_, value, saved)) and all(map(operator.is_, value.values(), saved.values())):
            return False
    if mark.attributes is not None and _differ(mark.attributes, attributes_beside(value)):
        return True
    if kind == "tensor":
        version, address, copied, gradient = saved
        own = _own_part(value)
        if own.data_ptr() != address or changed(gradient, gradient_of(value)):
            return True
        if value.device.type == "cpu":  # versions do not tell of what is changed by `.data`
            return not (same_bits(copied, own))
        return bool(_version(value) != version)
    if kind == "growing":
        return bool(len(value) != saved)
    if kind == "members":  # which there are: each is remembered by itself
        if isinstance(value, dict):
            return [key for key, _ in items_of(value)] != [key for key, _ in saved]
        return bool(base_of(value).__len__(value) != len(saved))
    if kind == "digest":  # beside it lies the function that digests
        return bool(saved[1](value) != saved[0])
    if kind in ("list", "deque", "tuple", "set"):
        if len(saved) != base_of(value).__len__(value):
            return True
        members = members_in(kind, value)
        is_same = len(members) == len(saved) and all(map(operator.is_, saved, members))  # if all are plain
        return not is_same and (len(members) != len(saved) or any(map(changed, saved, members)))
    if kind == "objects":
        return any(map(changed, saved, value.flat))
    if kind == "dict":
        return _has_other_items(mark, value)
    if kind == "object":
        return _differ(saved, attributes_of(value))
    if kind == "generator":
        return not same_state(saved, generator_state(value))
    if kind == "stream":
        return bool(stream_state(value) != saved)
    if kind == "cells":
        return cells_state(value) != saved  # type: ignore[no-any-return]
    if kind == "opaque":
        return False
    return bytes(saved) != bytes(value) if kind == "bytearray" else saved.tobytes() != value.tobytes()


def _has_other_items(mark: Mark, value: dict[Any, Any]) -> bool:
    items = items_of(value)
    return len(items) != len(mark.saved) or any(
        (key is not other and (isinstance(key, torch.Tensor) or key != other)) or changed(before, now)
        for (key, before), (other, now) in zip(mark.items, items, strict=True)
    )


def _differ(saved: dict[str, Any], now: dict[str, Any]) -> bool:
    return now.keys() != saved.keys() or any(changed(one, now[name]) for name, one in saved.items())


def is_undone(mark: Any) -> bool:
    """Return whether a value is what was remembered. False: it has changed, and no copy of it was kept."""
    return type(mark) is not Mark or mark.kind != "digest" or not changed(mark, mark.value)


def put_back(mark: Any) -> Any:
    """Make a value what it was, and return it."""
    if type(mark) is not Mark:
        return mark
    kind, value, saved = mark.kind, mark.value, mark.saved
    if kind in SEEN_ONLY or not changed(mark, value):
        return value
    if mark.attributes is not None and _differ(mark.attributes, own := attributes_beside(value)):
        own.clear()
        own.update((name, put_back(one)) for name, one in mark.attributes.items())
    if kind == "tensor":
        part = _own_part(value)
        with torch.no_grad():
            if part is not value:
                part.copy_(saved[2])
            elif value.data_ptr() != saved[1] or overlaps(value):
                copied = saved[2].clone()
                is_expanded = overlaps(value) and value.shape == copied.shape
                value.data = with_strides(copied, value.stride()) if is_expanded else copied
            else:
                value.copy_(saved[2])
            if value.is_leaf and value.requires_grad:
                value.grad = put_back(saved[3])
    elif kind == "growing":
        del value[saved:]
    elif kind == "members":
        _give_members(value, saved)
    elif kind == "list":
        list.__setitem__(value, slice(None), map(put_back, saved))
    elif kind == "objects":
        fill(value, map(put_back, saved))
    elif kind in ("deque", "set") and not isinstance(value, frozenset):
        kept = [put_back(one) for one in saved]
        base = base_of(value)
        base.clear(value)
        (base.extend if kind == "deque" else base.update)(value, kept)
    elif kind == "tuple":
        for one in saved:
            put_back(one)
    elif kind == "dict":
        kept_items = [(key, put_back(one)) for key, one in mark.items]
        refill(value, kept_items)
    elif kind == "object":
        for name in attributes_of(value).keys() - saved.keys():
            object.__delattr__(value, name)
        for name, one in saved.items():
            object.__setattr__(value, name, put_back(one))
    elif kind == "generator":
        set_generator_state(value, saved)
    elif kind == "stream":
        set_stream_state(value, saved)
    elif kind == "cells":
        set_cells_state(value, saved)
    elif kind == "bytearray":
        value[:] = saved  # also an array of numbers
    else:
        value[...] = saved
    return value


def _give_members(value: Any, members: list[Any]) -> None:
    """Make these the members of a container that can change, of a dict its items."""
    if isinstance(value, dict):
        refill(value, members)
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), members)
    else:
        deque.clear(value)
        deque.extend(value, members)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def _state_of(tensor: torch.Tensor) -> tuple[int, int, torch.Tensor]:
    own = _own_part(tensor)
    return _version(tensor), own.data_ptr(), own.detach().clone()


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, since to compare two of them is a collective; else the tensor itself."""
    return local_part(tensor) if is_distributed(tensor) else tensor


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf; None: it has none now."""
    return tensor.grad if tensor.is_leaf and tensor.requires_grad else None
