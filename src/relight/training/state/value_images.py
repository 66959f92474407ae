"""Copies of the values that optimizers and datasets keep: tensors, containers, objects."""

import copy
import dataclasses
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from relight.training.state.optimizers.own_objects import is_own
from relight.training.state.values.bits import same_bits
from relight.transfer.io.typed import attributes_of

_PLAIN = frozenset((float, int, bool, type(None), str))  # values that are not copied


Copies = dict[int, Any]  # of objects, by the id of what was copied


def copied(value: Any, copies: Copies) -> Any:
    """Return a copy of an optimizer's value, however deep tensors lie in it. Other threads may change containers."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if kind is dict:
        return {key: copied(member, copies) for key, member in list(value.items())}
    if isinstance(value, (list, tuple)):
        return _sequence(kind, [copied(member, copies) for member in value])
    if isinstance(value, (set, bytearray)) or _is_array(value):
        return value.copy()
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, member in list(twin.items()):
            twin[key] = copied(member, copies)
        return twin
    if isinstance(value, deque):
        return kind((copied(member, copies) for member in list(value)), value.maxlen)
    has_slots = dataclasses.is_dataclass(value) and not hasattr(value, "__dict__")
    if not (has_slots or is_own(value)):
        return value
    if id(value) not in copies:
        twin = copies[id(value)] = object.__new__(kind)
        for name, member in attributes_of(value).items():
            object.__setattr__(twin, name, copied(member, copies))
    return copies[id(value)]


class Restorer:
    """Puts back what `copied` copied, in the tensors, containers and objects that are there already where they fit."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}  # objects, by the id of their copies

    def restored(self, live: Any, before: Any) -> Any:
        """Return the value for the place where `live` is now, and `before` was."""
        if isinstance(before, torch.Tensor):
            if isinstance(live, torch.Tensor) and live.shape == before.shape and live.dtype == before.dtype:
                with torch.no_grad():
                    live.detach().copy_(before)
                return live
            return before
        if isinstance(before, dict):
            mine = live if isinstance(live, dict) else {}
            found = {key: self.restored(mine.get(key), value) for key, value in before.items()}
            into = live if type(live) is type(before) else before
            into.clear()
            into.update(found)
            return into
        if type(live) is type(before) and (isinstance(before, (list, set, bytearray, deque)) or _is_array(before)):
            return self._refilled(live, before)
        if isinstance(before, tuple) and type(live) is type(before) and len(live) == len(before):
            parts = [self.restored(own, value) for own, value in zip(live, before, strict=True)]
            return live if all(map(lambda one, other: one is other, parts, live)) else _sequence(type(before), parts)
        is_object = is_own(before) or dataclasses.is_dataclass(before)
        return self._object(live, before) if is_object and not isinstance(before, type) else before

    def _refilled(self, live: Any, before: Any) -> Any:
        """Give a container that is there already its former members."""
        if _is_array(before):
            if live.shape != before.shape or live.dtype != before.dtype:
                return before
            live[...] = before
        elif isinstance(before, list):
            if len(live) != len(before):
                return before
            live[:] = [self.restored(own, value) for own, value in zip(live, before, strict=True)]
        elif isinstance(before, bytearray):
            live[:] = before
        else:
            members = list(before)
            live.clear()
            (live.update if isinstance(live, set) else live.extend)(members)
        return live

    def _object(self, live: Any, before: Any) -> Any:
        if id(before) not in self._done:
            is_taken = type(live) is not type(before) or any(live is one for one in self._done.values())
            one = self._done[id(before)] = before if is_taken else live
            if one is live:
                mine, values = attributes_of(live), attributes_of(before)
                for name in mine.keys() - values.keys():
                    object.__delattr__(live, name)
                for name, value in values.items():
                    object.__setattr__(live, name, self.restored(mine.get(name), value))
        return self._done[id(before)]


def same_values(left: Any, right: Any) -> bool:
    """Return whether two values hold the same, bit by bit; or, unless tensors or containers, are the same object.

    A NaN is the same as another one, and 0.0 is not -0.0.
    """
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and same_bits(left, right)
    if _is_array(left):
        return bool(left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes())
    if dataclasses.is_dataclass(left):
        return same_values(attributes_of(left), attributes_of(right))
    if isinstance(left, dict):
        return same_values(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple, deque)):
        return len(left) == len(right) and all(map(same_values, list(left), list(right)))
    return bool(left == right if not isinstance(left, (float, complex)) else repr(left) == repr(right))


def can_change(value: Any) -> bool:
    """Return whether a value that can be copied may change in place."""
    if isinstance(value, (torch.Tensor, list, dict, set, bytearray, deque)) or _is_array(value):
        return True
    if isinstance(value, tuple):
        return any(map(can_change, value))
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


class Objects:
    """Numbers the objects of which copies are kept, so that they themselves take on again what they held."""

    _MOST = 1024

    def __init__(self) -> None:
        self.home = uuid.uuid4().hex  # numbers of other processes mean nothing here
        self._numbers: dict[int, int] = {}  # by `id`
        self._alive: dict[int, Any] = {}
        self._count = 0

    def number(self, value: Any) -> int:
        """Return the number of an object, which is kept alive for a while."""
        number = self._numbers.get(id(value), -1)
        if self._alive.get(number) is value:
            return number
        self._count += 1
        self._numbers[id(value)], self._alive[self._count] = self._count, value
        if len(self._alive) > self._MOST:
            oldest = next(iter(self._alive))
            self._numbers.pop(id(self._alive.pop(oldest)), None)
        return self._count

    def filled(self, values: Mapping[str, Any], home: str, numbers: Mapping[str, int]) -> dict[str, Any]:
        """Return the objects that had these numbers, with the values that were copied; in another process, new ones.

        Places that had one object get one object again.
        """
        found: dict[int, Any] = {}
        for path, number in numbers.items():
            if number not in found:
                live = self._alive.get(number) if home == self.home else None
                found[number] = Restorer().restored(live, copied(values[path], {}))
        return {path: found[number] for path, number in numbers.items()}


def _sequence(kind: Any, members: list[Any]) -> Any:
    """Return a list or tuple of this class."""
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple.__new__(kind, members)
    return kind(members)


def _is_array(value: Any) -> bool:
    """Return whether it is an array of NumPy, without which torch may run."""
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(type(value), "__setitem__")
