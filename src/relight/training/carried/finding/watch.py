"""Attributes of the script's own objects, compared in every step: some code changes them without showing it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relight.training.carried.code.refs import Place
from relight.training.carried.finding.places import MISSING, Spots
from relight.training.carried.finding.survey import Survey, holds_objects
from relight.training.state.values.kinds import kind_of
from relight.training.state.values.marks import Mark, changed, remember

_MOST = 256  # attributes: each takes a tenth of a microsecond, containers more
_FEW = 32  # items of a container
_CONTAINERS = ("list", "tuple", "dict", "deque")
_BYTES = 2**14  # of a tensor or an array


class Watch:
    """Marks the attributes that no code was seen to change; a step that changes one is noticed at once."""

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self._watched: list[tuple[Place, Mapping[str, Any], str]] = []  # with the memory of the object that has each
        self._marks: list[Any] = []

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compare."""
        return not self._watched

    def choose(self, survey: Survey, is_covered: Callable[[Place], bool]) -> None:
        """Watch the small attributes of the objects in a survey, except at places that are `covered`."""
        self.forget()
        self._watched = []
        for owner, names in survey.attributes.items():
            spot = self._spots.find(owner)
            memory = getattr(spot.get() if spot is not None else None, "__dict__", None)
            if memory is None or kind_of(spot.get() if spot is not None else None) != "object":
                continue
            for name in sorted(names):
                place = (*owner, ("attribute", name, ""))
                if _is_small(memory.get(name, MISSING)) and not is_covered(place):
                    self._watched.append((place, memory, name))
                if len(self._watched) == _MOST:
                    return

    def begin(self) -> None:
        """The step begins with the values of now."""
        self._marks = [_marked(memory.get(name, MISSING)) for _, memory, name in self._watched]

    def forget(self) -> None:
        """The step is not compared any more; no value is held for that."""
        self._marks = []

    def changes(self) -> Iterator[tuple[Place, Any]]:
        """Places that hold something else than when the step began, and marks of what they held then."""
        for (place, memory, name), mark in zip(self._watched, self._marks, strict=False):
            value = memory.get(name, MISSING)
            if value is not mark and changed(mark, value):
                yield place, mark


def _is_small(value: Any) -> bool:
    kind = kind_of(value)
    if kind in ("tensor", "array"):
        return bool(value.nbytes <= _BYTES)
    if kind in (*_CONTAINERS, "set"):
        return len(value) <= _FEW
    return kind in ("plain", "number", "object")


def _marked(value: Any) -> Any:
    kind = kind_of(value)
    if kind in ("plain", "number"):
        return value
    if kind == "object" or not _is_small(value):
        return Mark("opaque", value, None)  # another may take its place
    if kind in _CONTAINERS and holds_objects(value):
        return Mark("opaque", value, None)  # attributes of the objects are watched by themselves
    return remember(value)
