"""Objects with which a script began, by the places where they were: they stay themselves in another process."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from relight.training.state.values.kinds import attributes_of, is_fixed, items_of, kind_of, members_in
from relight.training.state.values.marks import DEEPEST, Mark

_OBJECTS = frozenset("list dict set deque object generator array objects bytearray tensor stream cells".split())
STEP = "\x1e"  # between the parts of a home's name


def is_one_object(value: Any) -> bool:
    """Return whether it matters that a value is this very object: it can change."""
    return kind_of(value) in _OBJECTS and not isinstance(value, frozenset)


def members_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Members of a value, with names that are equal in every process."""
    kind = kind_of(value)
    if kind in ("list", "tuple", "deque", "objects"):
        yield from ((str(index), one) for index, one in enumerate(members_in(kind, value)))
    elif kind == "dict":
        yield from ((label_of(index, key), one) for index, (key, one) in enumerate(items_of(value)))
    elif kind == "object":
        yield from attributes_of(value).items()


def label_of(index: int, key: Any) -> str:
    """The name of a dictionary's key, equal in every process."""
    return f"#{index}" if isinstance(key, (torch.Tensor, nn.Module)) else repr(key)


def _remembered(mark: Mark) -> Iterator[tuple[str, Any]]:
    """Members of a remembered value, as it was then."""
    if mark.kind in ("list", "tuple", "deque", "objects"):
        yield from ((str(index), one) for index, one in enumerate(mark.saved))
    elif mark.kind == "dict":
        yield from ((label_of(index, key), one) for index, (key, one) in enumerate(mark.items))
    elif mark.kind == "object":
        yield from mark.saved.items()


class Homes:
    """Objects that were at carried places, or in them, when those places were found: each by its name."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._objects: dict[str, Callable[[], Any]] = {}  # weak, where that can be: no old value lives on for this

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """A value, or the mark of one, and all that it holds. What has a name keeps it."""
        thing = value.value if isinstance(value, Mark) else value
        if depth > DEEPEST or name in self._objects:
            return
        if is_one_object(thing) or is_fixed(thing):
            if id(thing) in self._names:
                return
            self.name(name, thing)
        for step, one in _remembered(value) if isinstance(value, Mark) else members_of(thing):
            if isinstance(one, Mark) or kind_of(one) not in ("plain", "number", "opaque") or is_fixed(one):
                self.add(f"{name}{STEP}{step}", one, depth + 1)

    def name(self, name: str, thing: Any) -> None:
        """One object, without those that it holds. What has a name keeps it."""
        if id(thing) not in self._names and name not in self._objects:
            self._names[id(thing)] = name
            self._objects[name] = self._reference(thing)

    def name_of(self, value: Any) -> str | None:
        """None: it is none of them."""
        return self._names.get(id(value))

    @property
    def count(self) -> int:
        """The number of names, which only grows: a living object has got no other one while this is the same."""
        return len(self._objects)

    def has(self, name: str) -> bool:
        """Return whether there was one of this name; it may be gone."""
        return name in self._objects

    def at(self, name: str) -> Any:
        """None if there is none of this name."""
        found = self._objects.get(name)
        return None if found is None else found()

    def _reference(self, value: Any) -> Callable[[], Any]:
        number, names = id(value), self._names
        try:
            return weakref.ref(value, lambda _: names.pop(number, None))
        except TypeError:  # lists, dictionaries, and weak references themselves
            return lambda: value
