"""Buddy memory on a worker: snapshots of its own state, and those that it keeps for another rank.

At every K-th version each rank copies its state (its part, and its rank-private state) into host memory, and the rank
that is its buddy fetches that copy, in the background, through the engine of a restore: the same buckets, each verified
by its digest. All ranks copy the same versions, so their snapshots fit together.

Memory, per rank: two snapshots of its own and two that it keeps, and a buffer of one bucket to fetch them through,
allocated once. The older one of each pair is overwritten only when a newer version is *established*: complete at every
rank and at every buddy. That is found out with the barrier, which adds one number to its all-reduce. If buddies change
before that, a rank may keep more for a while: what it has of an earlier ward may be the only copy.

A step pays for starting the copy. The copy itself runs beside forward and backward, which leave parameters and
optimizer state alone; the first write waits for it.
"""

import threading
from collections.abc import Sequence

import msgspec
import torch

from relight.core.protocol.events import Snapshot
from relight.core.worker.snapshots import Due, SnapshotSlots
from relight.errors import RelightError, StepInterrupted, UsageError
from relight.training.checkpoint.snapshot_slots import PRIVATE_PATH, MemorySlot
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import local_part, spec_of
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.shared_fabric import SpareBuffer

_AGAIN_SECONDS = 0.5  # between two attempts to reach a ward


class Snapshots:
    """Snapshots as `Training.buddy` asks for them. Errors are reported, and fail no training."""

    def __init__(self, runtime: Runtime, state: TrackedState, assignment: Assignment) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._assignment = assignment
        self.every = 0
        self._slots = SnapshotSlots(MemorySlot)  # decides
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._client: RestoreClient | None = None
        self._spare = SpareBuffer()
        self._closed = threading.Event()  # the generation in which the thread works
        runtime.orders.at_close.append(self._cancel)

    def ask(self, every: int) -> None:
        """See `Training.buddy`."""
        if every < 1:
            raise UsageError(f"buddy(every={every}): at least 1")
        self.every = every
        if not self._assignment.shard and self._runtime.rank == 0:
            self._runtime.notices.say(
                "no buddies",
                "training.buddy(): every rank holds all of the state, so a buddy would hold nothing that the others do "
                "not; no snapshots are made",
            )

    @property
    def active(self) -> bool:
        """True if snapshots are made: not where every rank holds all of the state."""
        return bool(self.every) and bool(self._assignment.shard)

    # --- while training -------------------------------------------------------------------------------------------
    def assign(self, buddies: Sequence[int], keep: int = -1) -> None:
        """Set buddies, by rank, for this generation; `keep`: the version whose snapshots must stay for now."""
        runtime = self._runtime
        self._slots.assign(runtime.rank, buddies, keep)
        if buddies:
            address = msgspec.msgpack.encode(runtime.restores.server.address)
            runtime.store.set(runtime.generation, _key(runtime.rank), address)

    def between_steps(self) -> None:
        """Begin a snapshot if one is due: the state is that of a finished version, and nothing writes."""
        version = self._worker.version
        due = self._slots.is_due(version, self.every)
        if due is Due.YES:
            self._begin(version)
        elif due is Due.SKIPPED:
            self._runtime.notices.say(
                "slow buddies",
                f"no snapshot of version {version}: that of version {self._slots.newest} is still on its way to the "
                "buddies; raise buddy(every=...). Said once",
            )

    def before_write(self) -> None:
        """Wait for the copy that is being made: its source is about to change."""
        if not self._copied.is_set():
            self._copied.wait()

    def vote(self) -> list[int]:
        """Return the number that this rank adds to the barrier: 1 if it has both snapshots of the newest version."""
        return [self._slots.vote()] if self.active else []

    def count(self, votes: int) -> None:
        """Take the barrier's sum: older snapshots may go once every rank has the newest."""
        for slot in self._slots.count(votes, self._runtime.world_size):
            slot.release(self._runtime.restores.server)

    def _begin(self, version: int) -> None:
        if self._thread is not None:
            self._thread.join()  # it is done, or its generation was closed
        runtime = self._runtime
        room, sources = self._slots.begin(version), dict[int, torch.Tensor]()
        if room is not None:
            room.release(runtime.restores.server)
            try:
                sources = self._take(room, version)
            except (RuntimeError, MemoryError) as error:  # no memory, mostly; then this version is never established
                runtime.notices.say(
                    "no snapshots", f"rank {runtime.rank} cannot make a snapshot: {error}. Training goes on"
                )
                return
        kept = self._slots.room_for_ward()
        if kept is not None:
            kept.release(runtime.restores.server)
        self._copied.clear()
        self._closed.clear()
        work = (room, sources, kept, self._slots.ward, version, runtime.generation)
        self._thread = threading.Thread(target=self._work, args=work, name="relight-buddy", daemon=True)
        self._thread.start()

    def _work(
        self,
        room: MemorySlot | None,
        sources: dict[int, torch.Tensor],
        kept: MemorySlot | None,
        ward: int,
        version: int,
        generation: int,
    ) -> None:
        """Beside the steps, copy the rest into `room`, then the ward's snapshot into `kept`; None: it is there."""
        try:
            digests = [] if room is None else room.fill(sources)
        finally:
            sources.clear()
            self._copied.set()
        if room is not None:
            self._complete(room, digests)
        while kept is not None and self._runtime.orders.is_current(generation):
            try:
                self._fetch(kept, ward, version, generation)
            except StepInterrupted:
                return
            except (RelightError, OSError) as error:
                self._tell_of_ward(ward, generation, error)
                self._closed.wait(_AGAIN_SECONDS)
                continue
            self._slots.have = version
            return

    def _tell_of_ward(self, ward: int, generation: int, error: Exception) -> None:
        runtime = self._runtime
        if runtime.orders.is_current(generation):
            text = f"rank {runtime.rank} could not get a snapshot of rank {ward}, and tries again: {error}"
            runtime.notices.say("buddy", text)

    def _take(self, slot: MemorySlot, version: int) -> dict[int, torch.Tensor]:
        """Describe the state in `slot`; return tensors still to be copied, by their place among the slot's tensors.

        They do not change before a write.
        """
        runtime, state = self._runtime, self._state
        flat = state.replica.flat()
        private = runtime.page.read_private(version)
        assert private is not None  # kept in front of the barrier that the newest version came through
        tensors = [*flat.tensors, torch.frombuffer(bytearray(private), dtype=torch.uint8)]
        specs = [spec_of(tensor) for tensor in tensors]
        slot.make_room(specs)
        slot.rank, slot.version = runtime.rank, version
        slot.tree, slot.paths = flat.tree, [*flat.paths, PRIVATE_PATH]
        slot.meta = state.describe(self._worker.lineage, self._worker.until)
        steady = {local_part(parameter).data_ptr() for parameter in state.members.trained()}
        later = {}
        for index, (path, source) in enumerate(zip(slot.paths, tensors, strict=True)):
            if path.startswith("optimizers.") or source.data_ptr() in steady:
                later[index] = source
            else:  # buffers, averages: small, and forward may change them
                slot.tensors[index].copy_(source)
        return later

    def _complete(self, slot: MemorySlot, digests: Sequence[int]) -> None:
        """Serve it, now that all is copied. `digests`: by bucket, without private state."""
        slot.meta["digest"] = slot.digest(digests)
        slot.serve(
            self._runtime.restores.server, dict(enumerate(digests[:-1]))
        )  # private state goes into the last bucket as well

    def _fetch(self, slot: MemorySlot, ward: int, version: int, generation: int) -> None:
        """Get the ward's snapshot. Raises StepInterrupted or RestoreError if the generation is closed meanwhile."""
        runtime = self._runtime
        (answer,) = runtime.store.wait(generation, (_key(ward),), None)
        address = msgspec.msgpack.decode(answer, type=Address)
        room = dict(zip(slot.paths, slot.tensors, strict=True))
        client = self._client = runtime.restores.background_fetcher(self._spare)
        if not runtime.orders.is_current(generation):
            raise StepInterrupted("the generation was closed before there was anything to cancel")
        try:
            fetched = client.fetch(generation, version, [address], room.get, of=ward)
        finally:
            self._client = None
        header = fetched.header
        slot.meta, slot.tree, slot.paths, slot.tensors = header.meta, header.tree, header.paths, fetched.tensors
        slot.rank, slot.version = ward, version
        slot.serve(runtime.restores.server, fetched.digests)

    def _cancel(self) -> None:
        """End a fetch, since the generation is closed. Called by the link's thread."""
        self._closed.set()
        if (client := self._client) is not None:
            client.cancel()

    # --- in a recovery --------------------------------------------------------------------------------------------
    def held(self) -> tuple[Snapshot, ...]:
        """Return rank and version of each complete snapshot in this process's memory."""
        return tuple(Snapshot(rank=slot.rank, version=slot.version) for slot in self._slots.complete())

    def own(self, version: int) -> MemorySlot | None:
        """Return this rank's snapshot of `version`, or None."""
        return self._slots.find_own(version)

    def discard_after(self, version: int) -> None:
        """Release snapshots of newer versions, which are undone, also one that is being digested just now."""
        if self._thread is not None:
            self._thread.join()  # its generation is closed
        for slot in self._slots.newer_than(version):
            slot.release(self._runtime.restores.server)


def _key(rank: int) -> str:
    return f"buddy/{rank}"
