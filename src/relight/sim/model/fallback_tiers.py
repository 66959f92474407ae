"""The fallback tiers, as simulated ranks keep them: snapshots.py and checkpointing.py of training/checkpoint.

What goes on beside the main thread (a copy is made, a ward's snapshot is fetched, a checkpoint is written) is one
action of the world each: ("background", process, what, version, generation).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from relight.core.protocol.events import Snapshot
from relight.core.worker.snapshots import Due, Slot, SnapshotSlots, find
from relight.sim.model.contents import State

if TYPE_CHECKING:
    from relight.sim.model.worker.worker import SimulatedWorker


class Saved(NamedTuple):
    """All that a rank needs to go back to a version."""

    rank: int
    state: State
    private: int
    history: int  # the generation that had last undone versions when it was made


@dataclass
class SavedSlot(Slot):
    """Room for one snapshot."""

    saved: Saved | None = None

    def put(self, saved: Saved, *, complete: bool = False) -> None:
        """Fill it; a copy that is still being made is not complete."""
        self.rank, self.version, self.complete, self.saved = saved.rank, saved.state.version, complete, saved


class Disk:
    """The checkpoints of a job; every host sees them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._pieces: dict[tuple[int, Hashable], dict[int, Saved]] = {}  # by version and history, then by rank
        self.complete: dict[int, Mapping[int, Saved]] = {}

    def write(self, saved: Saved, history: Hashable) -> None:
        """One rank's piece; those of one history go together. What is complete stays as it is."""
        version = saved.state.version
        if version in self.complete:
            return
        pieces = self._pieces.setdefault((version, history), {})
        pieces[saved.rank] = saved
        if len(pieces) == self._world_size:
            self.complete[version] = pieces

    def discard(self, first: int) -> None:
        """Checkpoints of this version and of newer ones may hold a state that is wrong."""
        self.complete = {version: pieces for version, pieces in self.complete.items() if version < first}
        self._pieces = {key: pieces for key, pieces in self._pieces.items() if key[0] < first}


class FallbackTiers:
    """The tiers of one rank: its own snapshots, those that it keeps for its ward, and its checkpoints."""

    # Planted bugs put in others; see sim/planted.
    slots_kind: ClassVar[type[SnapshotSlots[SavedSlot]]] = SnapshotSlots
    mixes_histories: ClassVar[bool] = False

    def __init__(self, worker: "SimulatedWorker", buddy_every: int, checkpoint_every: int, disk: Disk) -> None:
        self._worker = worker
        self.buddy_every = buddy_every
        self.checkpoint_every = checkpoint_every
        self.disk = disk
        self._slots = self.slots_kind(SavedSlot)
        self._room: SavedSlot | None = None  # for what is being fetched
        self._writing: Saved | None = None

    # --- while training -------------------------------------------------------------------------------------------
    def assign(self, buddies: Sequence[int], keep: int = -1) -> None:
        """Snapshots.assign."""
        self._slots.assign(self._worker.rank, buddies, keep)

    @property
    def ward(self) -> int:
        """The rank whose snapshots it keeps; -1: none."""
        return self._slots.ward

    def between_steps(self) -> None:
        """Snapshots.between_steps and Checkpointing.between_steps."""
        version = self._worker.state.version
        is_due = self.checkpoint_every and version and version % self.checkpoint_every == 0
        if is_due and (self._writing is None or self._writing.state.version != version):
            self._writing = self._save()
            self._plan("write", version)
        if self._slots.is_due(version, self.buddy_every) is not Due.YES:
            return
        if (own := self._slots.begin(version)) is not None:
            own.put(self._save())
        if (room := self._slots.room_for_ward()) is not None:
            room.clear()
            self._room = room
        self._plan("copy", version)

    def _save(self) -> Saved:
        worker = self._worker
        return Saved(worker.rank, worker.state, worker.private, worker.machine.history)

    def vote(self) -> int:
        """The rank's part in the barrier's vote."""
        return self._slots.vote()

    def count(self, votes: int) -> None:
        """Take in the barrier's result."""
        world = self._worker.world
        for slot in self._slots.count(votes, world.world_size):
            slot.clear()
        if votes == world.world_size:
            world.checker.established(self._slots.newest)

    # --- beside the main thread -----------------------------------------------------------------------------------
    def _plan(self, what: str, version: int) -> None:
        self._worker.world.plan_background(self._worker, what, version)

    def go_on(self, what: str, version: int, generation: int) -> None:
        """Something that was planned comes due; `generation` is that in which it was."""
        if what == "write":
            if self._writing is not None and self._writing.state.version == version:
                self.disk.write(self._writing, 0 if self.mixes_histories else self._writing.history)
                if version in self.disk.complete:
                    self._worker.world.checker.reads(self._worker, self.disk.complete[version])
        elif what == "copy":
            for slot in self._slots.own:
                slot.complete = slot.complete or slot.version == version
            if self._worker.machine.newest <= generation and self._slots.have != version:
                self._plan("fetch", version)
        elif self._worker.machine.newest <= generation and self._slots.newest == version:
            found = self._worker.world.find_kept(self._worker, self.ward, version)
            if found is None:  # not there yet, or out of reach
                self._plan("fetch again", version)
                return
            assert self._room is not None
            self._room.put(found, complete=True)
            self._slots.have = version

    # --- in a recovery --------------------------------------------------------------------------------------------
    def held(self) -> tuple[Snapshot, ...]:
        """Snapshots that this rank reports."""
        self._worker.world.checker.keeps(self._worker, self.saved())
        return tuple(Snapshot(rank=saved.rank, version=saved.state.version) for saved in self.saved())

    def saved(self) -> list[Saved]:
        """Complete snapshots that are here."""
        return [slot.saved for slot in self._slots.complete() if slot.saved is not None]

    def kept_of(self, rank: int, version: int) -> Saved | None:
        """The snapshot of a rank's version, if it is here."""
        slot = find((*self._slots.own, *self._slots.kept), rank, version)
        return None if slot is None else slot.saved

    def checkpoints(self) -> tuple[int, ...]:
        """Complete ones, newest first."""
        return tuple(sorted(self.disk.complete, reverse=True)) if self.checkpoint_every else ()

    def discard_after(self, version: int) -> None:
        """Newer versions are undone. A copy that is being made is waited for first."""
        if self._writing is not None and self._writing.state.version > version:
            self._writing = None
        for slot in self._slots.newer_than(version):
            slot.clear()
