"""Values compared in every step, as some code changes them without showing it.

These are attributes of the script's own objects and classes, names of its modules, and variables of its closures.
"""

import enum
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from relight.training.carried.code.refs import Place
from relight.training.carried.finding.places import Spots, is_through_function
from relight.training.carried.finding.spots.spot import MISSING, DictSpot, Spot
from relight.training.carried.finding.survey import Survey, holds_objects
from relight.training.carried.finding.wholes import Wholes
from relight.training.carried.values.parts import is_part
from relight.training.state.values.kinds import HOLDERS, kind_of
from relight.training.state.values.marks import Mark, changed, remember
from relight.training.torch_private.modules import OWN_ATTRIBUTES

_MOST = 512  # values: each takes a tenth of a microsecond, containers more
_FEW = 32  # items of a container
_BYTES = 2**14  # of a tensor or an array


class Watch:
    """Marks values that no code was seen to change; a step that changes one is noticed at once."""

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self._is_part = functools.partial(is_part, spots.parts)
        self._watched: list[tuple[Place, Spot]] = []
        self._marks: list[Any] = []
        self._changed: list[int] | None = None  # of the watched, at the last look at all of them
        self._settings_seen: list[Any] | None = None  # when these were marked, and at the last look at all of them
        self._settings_now: list[Any] | None = None
        self._stays = False  # no code of the script runs between that look and the next step
        self._settings = 0  # so many of the watched, the last ones, are settings of the process
        self._attributes_at: dict[Place, frozenset[str]] = {}
        self._owners: dict[Place, Any] = {}  # objects whose attributes are watched
        self._homes: dict[int, Place] = {}  # of these, by `id`

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compare."""
        return not self._watched

    def choose(self, survey: Survey, is_told_otherwise: Callable[[Place], bool]) -> None:
        """Watch the small values of objects, classes, modules and closures in a survey, unless `is_told_otherwise`."""
        self.forget()
        self._attributes_at, self._owners = survey.attributes, {}
        # Layers may be many: what is the script's own comes first.
        found = sorted((*self._attributes(survey), *self._names(survey)), key=lambda one: _is_of_part(one[0]))
        small = ((place, spot) for place, spot in found if _is_small(spot.get()) and not is_told_otherwise(place))
        self._watched = sorted(itertools.islice(small, _MOST), key=lambda one: _is_setting(one[0]))
        self._settings = sum(_is_setting(place) for place, _ in self._watched)
        self._homes = {id(owner): place for place, owner in self._owners.items()}

    def _attributes(self, survey: Survey) -> Iterator[tuple[Place, Spot]]:
        for owner, names in survey.attributes.items():
            spot = self._spots.find(owner)
            thing = spot.get() if spot is not None else None
            has_attributes = self._spots.looks_into(thing) or isinstance(thing, enum.Enum)
            if isinstance(thing, type) or (has_attributes and hasattr(thing, "__dict__")):
                memory, self._owners[owner] = vars(thing), thing
                places = ((*owner, ("attribute", name, "")) for name in sorted(names))
                yield from ((at, DictSpot(memory, at[-1][1])) for at in places if not _is_kept_with_part(at))

    def _names(self, survey: Survey) -> Iterator[tuple[Place, Spot]]:
        for place in survey.found:
            is_name = (place[0][0] == "module" and len(place) == 1) or place[-1][0] == "setting"
            is_name |= is_through_function(place[-1])
            if is_name and (spot := self._spots.find(place)) is not None:
                yield place, spot

    def begin(self) -> None:
        """The step begins with the values of now."""
        if self._stays and self._changed is not None:
            for index in self._changed:
                self._marks[index] = self._marked(self._watched[index][1].get())
            self._settings_seen = self._settings_now
        else:
            self._settings_seen = self._spots.settings.look()
            self._marks = [self._marked(spot.get()) for _, spot in self._watched]
        self._changed, self._stays = None, False

    def end(self) -> None:
        """The step is not compared any more, and another one begins before code of the script runs."""
        self._stays = True

    def forget(self) -> None:
        """The step is not compared any more; no value is held for that."""
        self._marks, self._changed, self._stays = [], None, False

    def changes(self, *, settings: bool) -> Iterator[tuple[Place, Any]]:
        """Places that hold something else than when the step began, and marks of what they held then.

        A place comes before those in it: these now lead into another object, if that has taken its place.
        """
        found: dict[Place, Any] = {}
        moved, index = [], -1
        self._settings_now = self._spots.settings.look() if settings else None
        has_changed = settings and self._settings_now != self._settings_seen
        count = None if has_changed else len(self._watched) - self._settings
        for (place, spot), mark in itertools.islice(zip(self._watched, self._marks, strict=False), count):
            value, index = spot.get(), index + 1
            if value is not mark and changed(mark, value):
                moved.append(index)
                if self._is_where_it_was(place):
                    found[place] = mark
        self._changed = moved if settings and self._marks else None
        if any(type(mark) is Mark for mark in found.values()):
            marks = {place: mark for (place, _), mark in zip(self._watched, self._marks, strict=False)}
            wholes = Wholes(marks, self._attributes_at, self._home_of)
            found = {place: wholes.of(mark) for place, mark in found.items()}
        yield from ((place, found[place]) for place in sorted(found, key=len))

    def _is_where_it_was(self, place: Place) -> bool:
        """Return whether an attribute belongs to the object that is at its place; else that goes back as a whole."""
        owner = self._owners.get(place[:-1])
        spot = self._spots.find(place[:-1]) if owner is not None else None
        return spot is None or spot.get() is owner

    def _home_of(self, value: Any) -> Place | None:
        home = self._homes.get(id(value))
        return home if home is not None and self._owners.get(home) is value else None

    def _marked(self, value: Any) -> Any:
        kind = kind_of(value)
        if kind in ("plain", "number"):
            return value
        if kind == "object" or not _is_small(value):
            return Mark("opaque", value, None)  # another may take its place
        if kind in HOLDERS and holds_objects(value):
            return Mark("opaque", value, None)  # attributes of the objects are watched by themselves
        return remember(value, is_part=self._is_part)


def _is_setting(place: Place) -> bool:
    return place[0][0] == "setting"


def _is_of_part(place: Place) -> bool:
    """Return whether it is an attribute of a module that was handed over."""
    return place[0][0] == "inner" and len(place) == 2


def _is_kept_with_part(place: Place) -> bool:
    """Return whether it is one that every module has, which is kept with the module."""
    return _is_of_part(place) and place[1][1] in OWN_ATTRIBUTES


def _is_small(value: Any) -> bool:
    kind = kind_of(value)
    if kind in ("tensor", "array"):
        return bool(value.nbytes <= _BYTES)
    if kind in (*HOLDERS, "set"):
        return len(value) <= _FEW
    return kind in ("plain", "number", "object") or value is MISSING or isinstance(value, itertools.count)
