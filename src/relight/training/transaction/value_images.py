"""Copies of the values that optimizers keep in their state and in their groups: tensors, containers, objects."""

import copy
import dataclasses
from collections import deque
from typing import Any

import torch

from relight.training.state.optimizers.own_objects import is_own
from relight.transfer.io.typed import attributes_of

_PLAIN = frozenset((float, int, bool, type(None), str))  # values that are not copied


Copies = dict[int, Any]  # of objects, by the id of what was copied


def copied(value: Any, copies: Copies) -> Any:
    """Return a copy of an optimizer's value, however deep tensors lie in it."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if kind is dict:
        return {key: copied(member, copies) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return _sequence(kind, [copied(member, copies) for member in value])
    if isinstance(value, (set, bytearray)) or _is_array(value):
        return value.copy()
    if isinstance(value, dict):
        twin = copy.copy(value)
        for key, member in value.items():
            twin[key] = copied(member, copies)
        return twin
    if isinstance(value, deque):
        return kind((copied(member, copies) for member in value), value.maxlen)
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


def _sequence(kind: Any, members: list[Any]) -> Any:
    """Return a list or tuple of this class."""
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple.__new__(kind, members)
    return kind(members)


def _is_array(value: Any) -> bool:
    """Whether it is an array of NumPy, without which torch may run."""
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(type(value), "__setitem__")
