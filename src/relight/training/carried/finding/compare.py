"""Comparison of all values that a script can reach: in the first steps, and in the 8th, the 16th, the 32nd, ...

The attributes of the script's own objects are compared in every step.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from relight.training.carried.code.refs import OWNERS, Place, is_added
from relight.training.carried.finding.looks import Copies, Look, Places, Traces
from relight.training.carried.finding.places import Spots
from relight.training.carried.finding.spots.of_parts import is_kept_with_modules, is_of_script
from relight.training.carried.finding.spots.spot import MISSING
from relight.training.carried.finding.survey import Survey
from relight.training.carried.finding.watch import Watch
from relight.training.carried.finding.wholes import Wholes
from relight.training.carried.values.parts import is_part
from relight.training.state.values.kinds import kind_of
from relight.training.state.values.marks import changed, remember
from relight.training.torch_private.tensors import components_of
from relight.training.wrappers import is_loader

FIRST_STEPS = 3
_READS = ("iteration", "_num_iter_calls")  # of loaders of accelerate and Fabric: it makes the order of the next pass
_COMPILED = "torchdynamo"  # in names that torch sets on functions of the script's


def _is_compared_by_all(number: int) -> bool:
    """Return whether every process of a job that computes this step compares it."""
    return number < FIRST_STEPS or (number >= 2 * FIRST_STEPS and number & (number - 1) == 0)


def last_compared_by_all(version: int) -> int:
    """The last step before `version` that every process has compared which computed it; -1 if there is none."""
    last = version - 1
    if last < 2 * FIRST_STEPS:
        return min(last, FIRST_STEPS - 1)
    power = 1 << (last.bit_length() - 1)
    return power if power >= 2 * FIRST_STEPS else FIRST_STEPS - 1


@dataclass(frozen=True)
class Change:
    """A place that holds something else than when the step began."""

    place: Place
    mark: Any  # of what it held then
    nbytes: int  # of the tensor that is there now
    module: Place | None  # the one that has this tensor, and was not handed over


class Comparison:
    """Compares the step under way with its beginning, and a later moment with the last step that was compared."""

    def __init__(self, spots: Spots, is_foreign: Callable[[Any], bool]) -> None:
        """`is_foreign`: of an object that is not looked into."""
        self._spots = spots
        self._is_foreign = is_foreign
        self._is_part = functools.partial(is_part, spots.parts)
        self.rebound: set[Place] = set()  # names and attributes that steps bind to another object now and then
        self.watch = Watch(spots)
        self.number = 0  # of the step under way
        self.is_incomplete = False  # there was more than what is compared
        self._first = 0  # of the steps that this process commits
        self._commits = 0
        self._before: Survey | None = None
        self._last: Survey | None = None

    @property
    def is_due(self) -> bool:
        """True if all of the step under way is compared."""
        return self.is_first or _is_compared_by_all(self.number)

    @property
    def is_first(self) -> bool:
        """True in the first steps, all of which are compared."""
        return self.number - self._first < FIRST_STEPS

    @property
    def is_first_of_job(self) -> bool:
        """True in the first steps of the job: to end it later would lose what it has computed."""
        return self.number < FIRST_STEPS

    @property
    def is_idle(self) -> bool:
        """True if nothing of the step under way is compared."""
        return self.watch.is_empty and not self.is_due

    def begin(
        self, number: int, is_told_otherwise: Callable[[Place], bool], see: Callable[[Survey], None]
    ) -> list[Place]:
        """Compare step `number`, which begins, with the values of now. `see` gets what there is, if it is looked at.

        `is_told_otherwise`: of a place that need not be looked at in every step.
        Returns the places that have changed since the first steps, or since the step that was compared last.
        """
        self.number = number
        if self._commits == 0:
            self._first = number
        if not self.is_due:
            self.watch.begin()
            return []
        changed_since = self._changed_since_last() if self._commits >= FIRST_STEPS else []
        self._before = self._copied()
        self._last = self._traced()
        see(self._last)
        self.watch.choose(self._before, is_told_otherwise)
        return changed_since

    def look_again(self) -> None:
        """Take the values of now for those of the step that is compared, and of the one that was compared last."""
        if self._before is not None:
            self._before = self._copied()
        if self._last is not None:
            self._last = self._traced()
        self.watch.begin()

    def commit(self) -> None:
        """The step counts."""
        was_due = self.is_due
        self._commits += 1
        self.number += 1
        if was_due and not self.is_due:
            self._before = None

    def end(self) -> None:
        """The step is not compared any more, and another one begins at once."""
        self._before = None
        self.watch.end()

    def leave(self) -> None:
        """The loop has ended."""
        self._before = self._last = None
        self.watch.forget()

    def changes(self, is_covered: Callable[[Place], bool], *, settings: bool = True) -> Iterator[Change]:
        """Places that the step under way has changed so far, except at places that are `covered`.

        `settings`: also settings of the process.
        """
        before = self._before
        if before is None:
            for place, mark in self.watch.changes(settings=settings):
                spot = None if is_covered(place) else self._spots.find(place)
                if spot is not None and not _is_kept_with_module(place, spot.get()):
                    yield Change(place, mark, 0, None)
            return
        for place, mark in before.found.items():
            if not settings and place[0][0] == "setting":
                continue
            spot = None if is_covered(place) else self._spots.find(place)
            if spot is not None and changed(mark, value := spot.get()) and not _is_kept_with_module(place, value):
                held = Wholes(before.found, before.attributes, lambda one: before.homes.get(id(one))).of(mark)
                yield Change(place, held, _bytes_of(value), before.modules.get(place))
        for new in (*self._new_attributes(before, before), *self._new_names(before)):
            if not is_covered(new):
                yield Change(new, remember(MISSING), 0, None)

    def _new_attributes(self, before: Survey, now: Survey) -> Iterator[Place]:
        """Attributes that objects, classes, and modules and parameters that were handed over did not have."""
        for place, names in before.attributes.items():
            spot = self._spots.find(place) if place in now.attributes else None
            thing = spot.get() if spot is not None else None
            found = {} if thing is None else self._spots.own_attributes(thing)
            for name in sorted(found.keys() - names):
                if not _is_kept_otherwise(place, thing, name, found[name]):
                    yield (*place, ("attribute", name, ""))

    def _new_names(self, survey: Survey) -> Iterator[Place]:
        """Places of variables that modules of the script did not have; what steps import or define is none."""
        for module, names in survey.names.items():
            now = self._spots.frames.module(module) or {}
            for name in sorted(now.keys() - names):
                if not name.startswith("__") and kind_of(now[name]) != "opaque":
                    yield (("module", module, name),)

    def look(self) -> Survey:
        """All that can be reached now."""
        return self._survey(Places())

    def objects(self, survey: Survey) -> Iterator[tuple[Place, Any]]:
        """Objects of the script's own classes that were found."""
        for place in survey.found:
            spot = self._spots.find(place)
            if spot is not None and kind_of(thing := spot.get()) == "object":
                yield place, thing

    def of_loaders(self) -> Iterator[Place]:
        """Generators of loaders, samplers and layers, and how often loaders of accelerate and Fabric were read.

        An evaluation draws from them, and the first one may come in a later step.
        """
        survey = Survey(self._spots, self._is_foreign, Places(), enters_data=True, rebound=self.rebound)
        for place in survey.found:
            if (spot := self._spots.find(place)) is None:
                continue
            value = spot.get()
            holder = self._spots.find(place[:-1]) if len(place) > 1 and place[-1][1] in _READS else None
            is_drawn = kind_of(value) == "generator" and (id(value) in survey.drawn or place[0][0] in OWNERS)
            if is_drawn or (holder is not None and is_loader(holder.get())):
                yield place

    def _survey(self, look: Look) -> Survey:
        return Survey(self._spots, self._is_foreign, look, rebound=self.rebound)

    def _copied(self) -> Survey:
        return self._survey(Copies(self._is_part, self._is_foreign))

    def _traced(self) -> Survey:
        traces = Traces(self._is_part, self._is_foreign)
        survey = self._survey(traces)
        self.is_incomplete |= traces.is_incomplete
        return survey

    def changed_since(self) -> list[Place]:
        """Places that have changed since the last step that was compared began. Empty while one is."""
        is_under_way = self._before is not None or self._commits < FIRST_STEPS
        return [] if is_under_way else self._changed_since_last()

    def _changed_since_last(self) -> list[Place]:
        last = self._last
        if last is None:
            return []
        now = self._traced()
        places = [place for place, seen in last.found.items() if place in now.found and now.found[place] != seen]
        return [*places, *self._new_attributes(last, now), *self._new_names(last)]


def _is_kept_with_module(place: Place, value: Any) -> bool:
    """Return whether an attribute of a module that was handed over now has a value that is kept with the module."""
    return place[0][0] == "inner" and len(place) == 2 and is_kept_with_modules(place[1][1], value)


def _bytes_of(value: Any) -> int:
    return sum(part.nbytes for part in components_of(value)) if isinstance(value, torch.Tensor) else 0


def _is_kept_otherwise(place: Place, owner: Any, name: str, value: Any) -> bool:
    """Return whether an attribute that something has got is none of the script's, or is kept with its owner."""
    if isinstance(owner, torch.optim.Optimizer):
        return kind_of(value) == "opaque" or not is_added(owner, name)
    if callable(owner) and not isinstance(owner, nn.Module) and (name.startswith("__") or _COMPILED in name):
        return True
    if len(place) > 1 or place[0][0] not in ("slot", "inner"):
        return False
    is_opaque = place[0][0] == "inner" and kind_of(value) == "opaque"
    return is_opaque or not is_of_script(owner, name, value)
