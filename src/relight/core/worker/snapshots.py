"""Decisions about snapshots in host memory: when one is made, where it goes, and which ones must stay.

Each rank has two slots for its own snapshots and two for those of its ward. The older of each pair is overwritten only
when a newer version is *established*: complete at every rank and at every buddy. Drivers fill slots and serve them.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_SLOTS = 2  # of each kind, as long as buddies stay the same


@dataclass
class Slot:
    """Room for one snapshot; drivers add the contents."""

    rank: int = -1  # whose state this is
    version: int = -1
    complete: bool = False  # all of it is here

    def clear(self) -> None:
        """Give up what is in it."""
        self.rank, self.version, self.complete = -1, -1, False


S = TypeVar("S", bound=Slot)


class Due(enum.Enum):
    """The answer to whether a snapshot is begun at a boundary of steps. All ranks come to the same answer."""

    NO = "none is due"
    YES = "one is due"
    SKIPPED = "one would be due, but the newest is not established"


class SnapshotSlots(Generic[S]):
    """The slots of one worker. Versions are -1 where there is none."""

    def __init__(self, make_slot: Callable[[], S]) -> None:
        self._make_slot = make_slot
        self.own = [make_slot() for _ in range(_SLOTS)]
        self.kept = [make_slot() for _ in range(_SLOTS)]  # of the ward
        self.rank = -1
        self.ward = -1  # whose snapshots this rank keeps
        self.due = False  # at the first boundary after a recovery
        self.newest = -1  # the version whose snapshots were begun last, on all ranks
        self.established = -1  # of this generation
        self.have = -1  # the newest version of which this rank has both its own snapshot and its ward's
        self.needed = -1  # the version that all ranks would go back to
        self._holders: tuple[int, ...] | None = None  # whose snapshots of it are needed; None: also an earlier ward's

    # --- while training -----------------------------------------------------------------------------------------------
    def assign(self, rank: int, buddies: Sequence[int], keep: int) -> None:
        """Begin a generation; `keep`: the version whose snapshots must stay for now."""
        self.rank = rank
        self.ward = buddies.index(rank) if buddies else -1
        self.established = self.newest = self.have = -1
        self.needed, self._holders = keep, None
        self.due = bool(buddies)

    def is_due(self, version: int, every: int) -> Due:
        """Return whether to begin a snapshot of the version that is here; `every`: versions from one to the next."""
        if self.ward < 0 or not (self.due or version % every == 0) or version == self.newest:
            return Due.NO
        return Due.YES if self.due or self.newest == self.established else Due.SKIPPED

    def begin(self, version: int) -> S | None:
        """Begin a snapshot. Returns the slot for this rank's own, to be cleared first; None if it is there already.

        After a rank has gone back to a snapshot it is there, and what is older may still be needed.
        """
        self.due = False
        self.newest, self.have = version, -1
        return None if self.find_own(version) is not None else self._free(self.own)

    def room_for_ward(self) -> S | None:
        """Return the slot for the ward's newest snapshot, to be cleared first; None if it is there already."""
        if find(self.kept, self.ward, self.newest) is None:
            return self._free(self.kept)
        self.have = self.newest
        return None

    def vote(self) -> int:
        """Return the number that this rank adds to the barrier: 1 if it has both snapshots of the newest version."""
        return int(self.have >= 0 and self.have == self.newest)

    def count(self, votes: int, world_size: int) -> list[S]:
        """Take the barrier's sum: older snapshots may go once every rank has the newest. Returns slots to give up."""
        if votes != world_size or self.established == self.newest:
            return []
        self.established = self.needed = self.newest
        self._holders = (self.rank, self.ward)
        self.kept.sort(key=self.is_needed, reverse=True)
        given_up, self.kept = self.kept[_SLOTS:], self.kept[:_SLOTS]  # of earlier wards
        return given_up

    # --- in a recovery ------------------------------------------------------------------------------------------------
    def complete(self) -> list[S]:
        """Return the slots with complete snapshots."""
        return [slot for slot in (*self.own, *self.kept) if slot.complete]

    def find_own(self, version: int) -> S | None:
        """Return the complete snapshot of `version` that this process made as its rank, or None."""
        return find(self.own, self.rank, version)

    def newer_than(self, version: int) -> list[S]:
        """Return slots of newer versions: these are undone, so their snapshots must go."""
        return [slot for slot in (*self.own, *self.kept) if slot.version > version]

    # --- which slot may be overwritten --------------------------------------------------------------------------------
    def is_needed(self, slot: S) -> bool:
        """Return whether a recovery may have to go back to this snapshot."""
        return slot.version == self.needed >= 0 and (self._holders is None or slot.rank in self._holders)

    def overwritable(self, slots: list[S]) -> list[S]:
        """Return the slots whose snapshots may go."""
        return [slot for slot in slots if not self.is_needed(slot)]

    def _free(self, slots: list[S]) -> S:
        free = self.overwritable(slots)
        if not free:
            free = [self._make_slot()]
            slots += free
        return min(free, key=lambda slot: (slot.complete, slot.version))


def find(slots: Sequence[S], rank: int, version: int) -> S | None:
    """Return the complete snapshot of a rank's version among some, or None."""
    found = (slot for slot in slots if slot.complete and (slot.rank, slot.version) == (rank, version))
    return next(found, None)
