"""Modules that a step has made, also in objects that it made: a replacement has none in their place."""

import contextlib
import weakref
from typing import Any

from relight.training.carried.code.refs import Place, describe
from relight.training.carried.finding import refusals
from relight.training.carried.finding.compare import FIRST_STEPS
from relight.training.carried.finding.places import Spots, key_of
from relight.training.carried.finding.spots.spot import MISSING


class LateModules:
    """Lists them by place. A copy of the model that is kept as an average, say, or as the best so far."""

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self._known: dict[str, tuple[weakref.ref[Any], int]] = {}  # what stands in a place, and the step that put it

    def note(self, key: str, value: Any, step: int) -> None:
        """A module, or an object with one, that stands in this place now was left out."""
        with contextlib.suppress(TypeError):  # an object with slots, to which there are no weak references
            self._known[key] = weakref.ref(value), step

    def has(self, place: Place, step: int, *, is_first: bool) -> bool:
        """Return whether a tensor that has changed belongs to such a module.

        Raises UsageError if a step has changed the module in place, and is one of the first ones. Later that would lose
        what the job has computed; a module that was exchanged for another is often only the best one so far.
        """
        for length in range(1, len(place)):
            key = key_of(holder := place[:length])
            if key not in self._known:
                continue
            (known, since), spot = self._known[key], self._spots.find(holder)
            now = spot.get() if spot is not None else MISSING
            if known() is not now:
                self.note(key, now, step)
            elif since < step < FIRST_STEPS and is_first:  # of the job, and not only of a replacement
                raise refusals.of_late_module(describe(holder), now, place[-1][1])
            return True
        return False
