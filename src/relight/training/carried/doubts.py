"""Reasons why equal bits cannot be vouched for: what changes, and can be neither undone nor carried."""

from collections.abc import Collection

from relight.training.carried.code.refs import describe
from relight.training.carried.finding.catalog import Catalog
from relight.training.carried.finding.kept import UNSETTLED, Kept
from relight.training.carried.finding.told.received import received

_NAMED = 5  # places in a message
_LATE = (
    "{names}: changed by the script for the first time after its first steps, in a way that its code does not show, "
    "and so neither undone with a step nor carried to a replacement. If a step depends on it: training.carry(...); "
    "else training.carry(ignore=(...,))"
)
_OWNERLESS = (
    "{names}: kept in an object that this rank has, and that its replacement, built as the last rank, has not. Make it "
    "on all ranks, or anew in job.on_rank_change(...), or let standbys build when they have a rank: "
    "relight.init(late_standby=True)"
)
_OF_ANOTHER_RANK = (
    "multiprocessing: steps receive messages from processes that this one started as a standby, when it was built as "
    "another rank. Start them anew in job.on_rank_change(...), or let standbys build when they have a rank: "
    "relight.init(late_standby=True). training.carry(ignore=('multiprocessing',)) says that no step depends on them"
)


class Doubts:
    """Finds the reasons of one process, in what a catalog lists and in what can be reached besides."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._spots = catalog.loop.spots
        self._files = catalog.loop.spots.settings.files
        self._is_asked = False  # by a recovery, since the last turn
        self._later = self._ownerless = ""
        self._received: int | None = None  # messages of other processes, when this one took another rank

    def risk(self, *, recovers: bool) -> str:
        """Return the reason why a recovery cannot vouch for equal bits, if something changes and is not carried.

        `recovers`: one is under way.
        """
        self._spots.frames.forget()
        self._catalog.follow_parts()
        self._is_asked = self._is_asked or recovers
        risk = self._catalog.left_out_why or self._told() or self._late()
        self._spots.frames.forget()
        return risk

    def turn(self, late: Collection[Kept]) -> None:
        """The loop asks for a step. `late`: values that code after the last step was first seen to change."""
        is_asked, self._is_asked = self._is_asked, False
        if is_asked:
            names = sorted({one.name for one in late if one.feeds})
            self._later = UNSETTLED.format(names=", ".join(names)) if names else self._told()

    def note_ownerless(self, names: Collection[str]) -> None:
        """Note that a replacement has got values of these names, and not the objects that they belong to."""
        if names:
            self._ownerless = _OWNERLESS.format(names=", ".join(sorted(names)))

    def note_rank(self) -> None:
        """Note that this process takes another rank than the one that it was built as."""
        self._received = None if self._catalog.is_ignored("multiprocessing") else received()

    def later(self) -> str:
        """Return the reason that a recovery could not tell yet: the script has run on since, up to the turn."""
        later, self._later, self._ownerless = self._ownerless or self._later, "", ""
        if not later and self._received is not None and received() > self._received:
            later, self._received = _OF_ANOTHER_RANK, None
        return later or self._files.doubt_later()

    def of_undone(self) -> str:
        """Return the reason why a step that was just undone may end with other bits than without that, or "".

        Unlike `Undo.roll_back`, of values that are known to change and cannot be put back, and that end no job.
        """
        self._spots.frames.forget()
        doubt = self._catalog.unrepeatable.doubt_of_undone()
        self._spots.frames.forget()
        return doubt

    def mentioned(self, pattern: str) -> str:
        """Return FILE:LINE of the first line of the script that a pattern matches; empty: there is none."""
        return self._catalog.unrepeatable.mentioned(pattern)

    def _told(self) -> str:
        return self._catalog.unrepeatable.doubt({one.name.rpartition(".")[2] for one in self._catalog.kept.values()})

    def _late(self) -> str:
        catalog = self._catalog
        places = [place for place in catalog.comparison.changed_since() if not catalog.is_covered(place)]
        names = sorted(name for name in {describe(place) for place in places} if not catalog.is_ignored(name))
        return _LATE.format(names=", ".join(names[:_NAMED])) if names else ""
