"""A step that does not count: the values that it changed go back to those with which it began.

That is done twice. At the end of the block they become what they were at `with step`, since code after the block may
expect what code above it has done: a section that was opened, a timer that runs. When the loop asks for the step again,
they become what they were when it asked for it first, since code above the block runs again.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from relight.training.carried.code.refs import describe
from relight.training.carried.finding.catalog import Catalog
from relight.training.carried.finding.kept import NEVER, Kept
from relight.training.carried.finding.places import key_of, place_of
from relight.training.carried.finding.spots.spot import MISSING, AttributeSpot
from relight.training.carried.values.parts import is_part
from relight.training.state.values.marks import SEEN_ONLY, Mark, changed, is_undone, put_back, remember
from relight.words import listed

_LASTING = (
    "{names}: changed by the step, in a way that its code does not show. It is too large for the copy with which it "
    "would go back when a step is undone, or of another kind (an iterator cannot go back: choose by step.number what "
    "it gives). training.carry(...) keeps a copy in every step, of up to 32 MiB; larger tensors belong into a module "
    "that is handed over (relight.Training(model=...)). training.carry(ignore=(...,)) says that no step depends on it "
    "(docs/CARRIED.md)"
)


class Undo:
    """Remembers what a catalog lists at the beginning of a step, and puts it back."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._is_part = functools.partial(is_part, catalog.parts)
        self._kept = catalog.kept
        self._spots = catalog.loop.spots
        self._at_entry: dict[str, Any] = {}  # marks of what code above the block has changed, by key
        self._lasting: list[str] = []  # keys of what the last step that was undone has left changed

    def remember(self, *, compared: bool) -> None:
        """Remember the values of now; `compared`: those that are written down are as they were kept last."""
        self._at_entry.clear()
        for one in self._kept.values():
            is_kept = compared and one.is_written and one.kept is not NEVER
            one.mark = one.kept if is_kept else self._catalog.mark_of(one.spot.get(), one)

    def enter_block(self) -> None:
        """Remember what code above the block has changed, except tensors, by which code after it does not go."""
        self._spots.frames.forget()
        for one in self._kept.values():
            if not one.is_of_data and _may_count(one.mark) and changed(one.mark, value := one.spot.get()):
                self._at_entry[one.key] = self._catalog.mark_of(value, one)
        for change in self._catalog.comparison.changes(self._catalog.is_covered):
            if _may_count(change.mark) and (spot := self._spots.find(change.place)) is not None:
                self._at_entry[key_of(change.place)] = remember(spot.get(), is_part=self._is_part)
        self._spots.frames.forget()

    def roll_back(self) -> str | None:
        """Put back what the step under way changed. Returns why a repetition of it may end with other bits."""
        self._spots.frames.forget()
        self._catalog.notice(between=False)
        self._catalog.unrepeatable.roll_back()
        self.put_back(self._kept.values(), self._at_entry)
        lasting = [(one.key, one.mark) for one in self._kept.values() if not (one.is_of_data or self._is_undone(one))]
        lasting += self._put_back_left_out()
        self._at_entry.clear()
        self._spots.frames.forget()
        # One name of each value; a plain one is its own mark.
        self._lasting = list({id(getattr(mark, "value", mark)): key for key, mark in reversed(lasting)}.values())
        return _of_lasting(self._lasting)

    def put_back(self, those: Iterable[Kept], marks: Mapping[str, Any] | None = None) -> None:
        """Make places what they were when the loop asked for the step, or what other `marks` say, by key."""
        marks = marks or {}
        self._spots.frames.forget()
        self._catalog.follow_parts()
        for one in those:
            now = one.spot.get()
            mark = marks.get(one.key, one.mark)
            if not one.is_of_data and changed(mark, now):
                value = put_back(mark)
                if value is not now:
                    one.spot.set(value)
        self._spots.frames.forget()

    def _is_undone(self, one: Kept) -> bool:
        """Return whether a place is what it was; a context variable cannot become one without a value again.

        An attribute that is gone again has the value of its class.
        """
        mark = self._at_entry.get(one.key, one.mark)
        is_gone = put_back(mark) is MISSING and isinstance(one.spot, AttributeSpot)
        return is_undone(one.mark) and (is_gone or not changed(mark, one.spot.get()))

    def doubt(self, replaced: Collection[str]) -> str | None:
        """Return why equal bits cannot be vouched for, once these keys have got values of another process."""
        return _of_lasting([key for key in self._lasting if key not in replaced])

    def _put_back_left_out(self) -> Iterator[tuple[str, Any]]:
        """Put back what is not carried, if the step is compared. Yields the keys and marks of what stays."""
        left_out = self._catalog.left_out
        for change in self._catalog.comparison.changes(lambda place: key_of(place) not in left_out):
            spot = self._spots.find(change.place)
            if spot is not None and (value := put_back(change.mark)) is not spot.get():
                spot.set(value)
            if not is_undone(change.mark):
                yield key_of(change.place), change.mark


def _may_count(mark: Any) -> bool:
    """Return whether this is a value that code may go by: numbers, containers, objects."""
    return not (isinstance(mark, Mark) and (mark.kind in SEEN_ONLY or mark.kind in ("tensor", "array")))


def _of_lasting(keys: Sequence[str]) -> str | None:
    return _LASTING.format(names=listed(sorted(describe(place_of(key)) for key in keys))) if keys else None
