"""The fallback tiers, as simulated ranks keep them: snapshots.py and checkpointing.py of training/checkpoint.

What goes on beside the main thread (a copy is made, a ward's snapshot is fetched, a checkpoint is written) is one
action of the world each: ("background", process, what, version, generation).
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from relight.core.events import Snapshot
from relight.sim.model.contents import State

if TYPE_CHECKING:
    from relight.sim.model.worker import SimulatedWorker


_SLOTS = 2  # of each kind, as long as buddies stay the same


class Saved(NamedTuple):
    """All that a rank needs to go back to a version."""

    rank: int
    state: State
    private: int
    history: int  # the generation that had last undone versions when it was made


class Slot:
    """Room for one snapshot."""

    __slots__ = ("complete", "saved")

    def __init__(self) -> None:
        self.saved: Saved | None = None
        self.complete = False

    @property
    def version(self) -> int:
        """Of what is, or will be, in it; -1: nothing."""
        return -1 if self.saved is None else self.saved.state.version


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
    """Of one rank: its own snapshots, those that it keeps for its ward, and what it writes."""

    # Variants that the real one must not have; see mutations.py.
    overwrites_the_only_one: ClassVar[bool] = False
    keeps_what_is_undone: ClassVar[bool] = False
    forgets_what_to_keep: ClassVar[bool] = False
    mixes_histories: ClassVar[bool] = False
    takes_kept_for_established: ClassVar[bool] = False

    def __init__(self, worker: "SimulatedWorker", buddy_every: int, checkpoint_every: int, disk: Disk) -> None:
        self._worker = worker
        self.buddy_every = buddy_every
        self.checkpoint_every = checkpoint_every
        self.disk = disk
        self.ward = -1  # whose snapshots it keeps
        self._due = False
        self._newest = self._established = self._needed = self._have = -1
        self._own = [Slot() for _ in range(_SLOTS)]
        self._kept = [Slot() for _ in range(_SLOTS)]
        self._room = self._kept[0]  # of these: for what is being fetched
        self._writing: Saved | None = None

    # --- while training -------------------------------------------------------------------------------------------
    def assign(self, buddies: Sequence[int], keep: int = -1) -> None:
        """Snapshots.assign."""
        self.ward = buddies.index(self._worker.rank) if buddies else -1
        self._needed = -1 if self.forgets_what_to_keep else keep
        self._established, self._newest, self._have = keep if self.takes_kept_for_established else -1, -1, -1
        self._due = bool(buddies)

    def between_steps(self) -> None:
        """Snapshots.between_steps and Checkpointing.between_steps."""
        version = self._worker.state.version
        is_due = self.checkpoint_every and version and version % self.checkpoint_every == 0
        if is_due and (self._writing is None or self._writing.state.version != version):
            self._writing = self._save()
            self._plan("write", version)
        if self.ward < 0 or not (self._due or version % self.buddy_every == 0) or version == self._newest:
            return
        if not self._due and self._newest != self._established:
            return
        self._due = False
        self._newest, self._have = version, -1
        if self.kept_of(self._worker.rank, version) is None:
            self._free(self._own).saved = self._save()
        if self.kept_of(self.ward, version) is not None:
            self._have = version
        else:
            self._room = self._free(self._kept)
        self._plan("copy", version)

    def _save(self) -> Saved:
        worker = self._worker
        return Saved(worker.rank, worker.state, worker.private, worker.machine.history)

    def _free(self, slots: list[Slot]) -> Slot:
        free = slots[:1] if self.overwrites_the_only_one else [slot for slot in slots if not self._is_needed(slot)]
        if not free:
            free = [Slot()]
            slots += free
        slot = min(free, key=lambda slot: (slot.complete, slot.version))
        slot.saved, slot.complete = None, False
        return slot

    def _is_needed(self, slot: Slot) -> bool:
        settled = self._established == self._needed
        is_ours = slot.saved is not None and slot.saved.rank in (self._worker.rank, self.ward)
        return slot.version == self._needed >= 0 and not (settled and not is_ours)

    def vote(self) -> int:
        """What it adds to the barrier."""
        return int(self._have >= 0 and self._have == self._newest)

    def count(self, votes: int) -> None:
        """What the barrier gave."""
        if votes == self._worker.world.world_size:
            self._needed = self._established = self._newest
            self._kept.sort(key=self._is_needed, reverse=True)
            del self._kept[_SLOTS:]
            self._worker.world.checker.established(self._newest)

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
            for slot in self._own:
                slot.complete = slot.complete or slot.version == version
            if self._worker.machine.newest <= generation and self._have != version:
                self._plan("fetch", version)
        elif self._worker.machine.newest <= generation and self._newest == version:
            found = self._worker.world.find_kept(self._worker, self.ward, version)
            if found is None:  # not there yet, or out of reach
                self._plan("fetch again", version)
                return
            self._room.saved, self._room.complete = found, True
            self._have = version

    # --- in a recovery --------------------------------------------------------------------------------------------
    def held(self) -> tuple[Snapshot, ...]:
        """What a rank reports."""
        self._worker.world.checker.keeps(self._worker, self.saved())
        return tuple(Snapshot(rank=saved.rank, version=saved.state.version) for saved in self.saved())

    def saved(self) -> list[Saved]:
        """Complete snapshots that are here."""
        return [slot.saved for slot in (*self._own, *self._kept) if slot.saved is not None and slot.complete]

    def kept_of(self, rank: int, version: int) -> Saved | None:
        """That rank's snapshot of that version, if it is here."""
        found = (saved for saved in self.saved() if (saved.rank, saved.state.version) == (rank, version))
        return next(found, None)

    def checkpoints(self) -> tuple[int, ...]:
        """Complete ones, newest first."""
        return tuple(sorted(self.disk.complete, reverse=True)) if self.checkpoint_every else ()

    def discard_after(self, version: int) -> None:
        """Newer versions are undone. A copy that is being made is waited for first."""
        if self._writing is not None and self._writing.state.version > version:
            self._writing = None
        for slot in (*self._own, *self._kept):
            if slot.version > version and not self.keeps_what_is_undone:
                slot.saved, slot.complete = None, False
