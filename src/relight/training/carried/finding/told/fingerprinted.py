"""Objects that only a fingerprint shows to have changed: taken when the loop begins, and in some steps after that."""

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from relight.training.carried.code.refs import Place
from relight.training.state.values.contents import Digests
from relight.training.state.values.fingerprints import differs, fingerprint_of


@dataclass(frozen=True)
class _Seen:
    place: Place
    value: Callable[[], Any]  # the object, or None once it is gone
    fingerprint: Any


_Look = dict[int, _Seen]  # by the `id` of the object


class Fingerprinted:
    """Compares the objects of now with the same ones as they were first, and when they were looked at last."""

    def __init__(self, is_kept_otherwise: Callable[[Any], bool]) -> None:
        """`is_kept_otherwise`: of a value in them of which it only matters that it is this one."""
        self._is_kept_otherwise = is_kept_otherwise
        self._first: _Look = {}
        self._last: _Look = {}
        self._changed: set[Place] = set()  # also what has become again what it was

    def see(self, found: dict[Place, Any], anew: Collection[Place] = ()) -> None:
        """These are all, at the beginning of a step. `anew`: those that are compared with now from now on."""
        now = self._look(found)
        if anew:
            self._first = {number: one for number, one in self._first.items() if one.place not in anew}
            self._last = {number: one for number, one in self._last.items() if one.place not in anew}
        self._changed |= _differing(self._last, now)
        self._first = {number: self._of(self._first, number, one) for number, one in now.items()}
        self._last = now

    def changed(self, found: dict[Place, Any]) -> set[Place]:
        """Return the places of those that have changed since they were seen first. These are all now."""
        now = self._look(found)
        return self._changed | _differing(self._first, now) | _differing(self._last, now)

    def changed_in_step(self, found: dict[Place, Any]) -> set[Place]:
        """Return the places of those that have changed since they were seen last."""
        return _differing(self._last, self._look(found))

    def _look(self, found: dict[Place, Any]) -> _Look:
        digests = Digests(self._is_kept_otherwise)
        return {
            id(value): _Seen(place, _reference(value), fingerprint_of(value, digests)) for place, value in found.items()
        }

    @staticmethod
    def _of(earlier: _Look, number: int, now: _Seen) -> _Seen:
        """Return how this very object was seen earlier, or else how it is seen now."""
        before = earlier.get(number)
        return before if before is not None and before.value() is now.value() else now


def _differing(before: _Look, now: _Look) -> set[Place]:
    return {
        one.place
        for number, one in now.items()
        if number in before
        and before[number].value() is one.value()
        and differs(before[number].fingerprint, one.fingerprint)
    }


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # of C, and small
        return lambda: value
