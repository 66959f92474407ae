"""A step that does not count: the values that it changed go back to those with which it began."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from relight.training.carried.code.refs import describe
from relight.training.carried.finding.catalog import Catalog
from relight.training.carried.finding.kept import NEVER, Kept
from relight.training.carried.finding.places import key_of, place_of
from relight.training.carried.finding.spots.spot import MISSING, AttributeSpot
from relight.training.state.values.marks import changed, is_undone, put_back
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
        self._kept = catalog.kept
        self._spots = catalog.loop.spots
        self._lasting: list[str] = []  # keys of what the last step that was undone has left changed

    def remember(self, *, compared: bool) -> None:
        """Remember the values of now; `compared`: those that are written down are as they were kept last."""
        for one in self._kept.values():
            is_kept = compared and one.is_written and one.kept is not NEVER
            one.mark = one.kept if is_kept else self._catalog.mark_of(one.spot.get(), one)

    def roll_back(self) -> str | None:
        """Put back what the step under way changed. Returns why a repetition of it may end with other bits."""
        self._spots.frames.forget()
        self._catalog.notice(between=False)
        self._catalog.unrepeatable.roll_back()
        self.put_back()
        lasting = [(one.key, one.mark) for one in self._kept.values() if not (one.is_of_data or self._is_undone(one))]
        lasting += self._put_back_left_out()
        self._spots.frames.forget()
        # One name of each value; a plain one is its own mark.
        self._lasting = list({id(getattr(mark, "value", mark)): key for key, mark in reversed(lasting)}.values())
        return _of_lasting(self._lasting)

    def put_back(self) -> None:
        """Put back the values that are carried."""
        self._spots.frames.forget()
        self._catalog.follow_parts()
        for one in self._kept.values():
            now = one.spot.get()
            if not one.is_of_data and changed(one.mark, now):
                value = put_back(one.mark)
                if value is not now:
                    one.spot.set(value)
        self._spots.frames.forget()

    @staticmethod
    def _is_undone(one: Kept) -> bool:
        """Return whether a place is what it was; a context variable cannot become one without a value again.

        An attribute that is gone again has the value of its class.
        """
        is_gone = put_back(one.mark) is MISSING and isinstance(one.spot, AttributeSpot)
        return is_undone(one.mark) and (is_gone or not changed(one.mark, one.spot.get()))

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


def _of_lasting(keys: Sequence[str]) -> str | None:
    return _LASTING.format(names=listed(sorted(describe(place_of(key)) for key in keys))) if keys else None
