"""Buddy memory, seen from a worker: snapshots of its own state, and those that it keeps for another rank.

At every K-th version each rank copies its state (its part, and what only this rank has) into host memory, and the rank
that is its buddy fetches that copy, in the background, through the engine of a restore: the same buckets, each verified
by its digest. All ranks copy the same versions, so their snapshots fit together.

Memory, per rank: two snapshots of its own and two that it keeps, and a buffer of one bucket to fetch them through,
allocated once. The older one of each pair is overwritten only when a newer version is *established*: complete at every
rank and at every buddy. That is found out with the barrier, which adds one number to its all-reduce. If buddies change
before that, a rank may keep more for a while: what it has of an earlier ward may be the only copy.

What this costs a step: starting the copy. It goes on beside forward and backward, which leave parameters and optimizer
state alone; the first write waits for it.
"""

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from relight.core.events import Snapshot
from relight.errors import RelightError, StepInterrupted, UsageError
from relight.training.process.progress import Progress
from relight.training.process.runtime import Runtime
from relight.training.state.assignment import Assignment
from relight.training.state.tracked import TrackedState
from relight.transfer.io.codec import Flat, TensorSpec, digest_of, is_plain, local_part, spec_of
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import Offer, plan_state
from relight.transfer.restore.shared_fabric import SpareBuffer
from relight.transfer.tensors.weights import TensorReader

_PRIVATE_PATH = "\x00private"  # the last tensor of a snapshot: what only this rank has, as bytes
_SLOTS = 2  # of each kind, as long as buddies stay the same
_AGAIN_SECONDS = 0.5  # between two attempts to reach a ward


@dataclass
class Slot:
    """Room for one snapshot."""

    rank: int = -1  # whose state this is
    version: int = -1
    complete: bool = False  # all of it is here
    meta: dict[str, Any] = field(default_factory=dict)
    tree: Any = None
    paths: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)  # used again by the next; the last one is private
    offer: Offer | None = None  # as it is served

    def copy_to(self, destination: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Its contents, in those of the tensors at `destination` that fit, and in new ones. It stays as it is."""
        copies = []
        for path, kept in zip(self.paths, self.tensors, strict=True):
            own = destination.get(path)
            fits = own is not None and spec_of(own) == spec_of(kept)
            copies.append(own.copy_(kept) if own is not None and fits else kept.clone())
        return copies


class SnapshotFlat(Flat):
    """A tree that was flattened before."""

    def __init__(self, tree: Any, paths: list[str], tensors: list[torch.Tensor]) -> None:
        self.tree, self.paths, self.tensors = tree, paths, tensors


class Snapshots:
    """What `Training.buddy` asked for. Nothing here can fail a training that runs; what goes wrong is told."""

    def __init__(self, runtime: Runtime, state: TrackedState, progress: Progress, assignment: Assignment) -> None:
        self._runtime = runtime
        self._state = state
        self._progress = progress
        self._assignment = assignment
        self.every = 0
        self._ward = -1  # whose snapshots this rank keeps
        self._due = False  # the first boundary after a recovery: nothing that was under way goes on
        self._newest = -1  # the version whose snapshots were begun last, on all ranks
        self._established = -1  # of this generation
        self._needed = -1  # the version that all would go back to; of which a rank may still be with an earlier buddy
        self._have = -1  # newest version of which this rank has both its own and its ward's
        self._own = [Slot() for _ in range(_SLOTS)]
        self._kept = [Slot() for _ in range(_SLOTS)]
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._client: RestoreClient | None = None
        self._spare = SpareBuffer()
        self._closed = threading.Event()  # the generation in which the thread works
        runtime.at_close.append(self._cancel)

    def ask(self, every: int) -> None:
        """See `Training.buddy`."""
        if every < 1:
            raise UsageError(f"buddy(every={every}): at least 1")
        self.every = every
        if not self._assignment.shard and self._runtime.rank == 0:
            self._runtime.say(
                "no buddies",
                "training.buddy(): every rank holds all of the state, so a buddy would hold nothing that the others do "
                "not; no snapshots are made",
            )

    @property
    def active(self) -> bool:
        """Whether snapshots are worth anything: where every rank holds all of the state, they are not."""
        return bool(self.every) and bool(self._assignment.shard)

    # --- while training -------------------------------------------------------------------------------------------
    def assign(self, buddies: Sequence[int], keep: int = -1) -> None:
        """A generation begins. `buddies` by rank; `keep`: the version whose snapshots must stay for now."""
        runtime = self._runtime
        self._ward = buddies.index(runtime.rank) if buddies else -1
        self._needed, self._established, self._newest, self._have = keep, -1, -1, -1
        self._due = bool(buddies)
        if buddies:
            address = msgspec.msgpack.encode(runtime.server.address)
            runtime.store.set(runtime.generation, _key(runtime.rank), address)

    def between_steps(self) -> None:
        """The state is that of a finished version, and nobody writes: copy it if that is due."""
        version = self._progress.version
        if self._ward < 0 or not (self._due or version % self.every == 0) or version == self._newest:
            return
        if not self._due and self._newest != self._established:  # the same on all ranks: the barrier said so
            self._runtime.say(
                "slow buddies",
                f"no snapshot of version {version}: that of version {self._newest} is still on its way to the buddies; "
                "raise buddy(every=...). Said once",
            )
            return
        self._due = False
        self._begin(version)

    def before_write(self) -> None:
        """What is being copied is about to change."""
        if not self._copied.is_set():
            self._copied.wait()

    def vote(self) -> list[int]:
        """What this rank adds to the barrier: 1 if it has all that it is to have of the newest version."""
        return [int(self._have >= 0 and self._have == self._newest)] if self.active else []

    def count(self, votes: int) -> None:
        """The barrier's sum: older snapshots are of no more use once everybody has the newest."""
        if votes == self._runtime.world_size and self._established != self._newest:
            self._needed = self._established = self._newest
            self._kept.sort(key=self._is_needed, reverse=True)
            for slot in self._kept[_SLOTS:]:  # of earlier wards
                self._forget(slot)
            del self._kept[_SLOTS:]

    def _begin(self, version: int) -> None:
        if self._thread is not None:
            self._thread.join()  # it is done, or its generation was closed
        runtime = self._runtime
        self._newest, self._have = version, -1
        # After going back to a snapshot it is there already, and what is older may still be needed.
        own, sources = self.own(version), dict[int, torch.Tensor]()
        if own is None:
            own = self._free(self._own)
            try:
                sources = self._take(own, version)
            except (RuntimeError, MemoryError) as error:  # no memory, mostly; then this version is never established
                runtime.say("no snapshots", f"rank {runtime.rank} cannot make a snapshot: {error}. Training goes on")
                return
        kept = None
        if self._find(self._kept, self._ward, version) is not None:
            self._have = version
        else:
            kept = self._free(self._kept)
        self._copied.clear()
        self._closed.clear()
        work = (own, sources, kept, self._ward, version, runtime.generation)
        self._thread = threading.Thread(target=self._work, args=work, name="relight-buddy", daemon=True)
        self._thread.start()

    def _work(
        self,
        own: Slot,
        sources: dict[int, torch.Tensor],
        kept: Slot | None,
        ward: int,
        version: int,
        generation: int,
    ) -> None:
        """Beside the steps: what is left to copy into `own`, then the ward's into `kept`, unless it is there."""
        try:
            digests = [] if own.complete else _fill(own, sources)
        finally:
            sources.clear()
            self._copied.set()
        if not own.complete:
            self._complete(own, digests)
        while kept is not None and self._runtime.is_current(generation):
            try:
                self._fetch(kept, ward, version, generation)
            except StepInterrupted:
                return
            except (RelightError, OSError) as error:
                self._tell_of_ward(ward, generation, error)
                self._closed.wait(_AGAIN_SECONDS)
                continue
            self._have = version
            return

    def _tell_of_ward(self, ward: int, generation: int, error: Exception) -> None:
        runtime = self._runtime
        if runtime.is_current(generation):
            text = f"rank {runtime.rank} could not get a snapshot of rank {ward}, and tries again: {error}"
            runtime.say("buddy", text)

    def _free(self, slots: list[Slot]) -> Slot:
        """The one that is needed least; nobody reads it any more when this returns."""
        free = [slot for slot in slots if not self._is_needed(slot)]
        if not free:
            free = [Slot()]
            slots += free
        slot = min(free, key=lambda slot: (slot.complete, slot.version))
        self._forget(slot)
        slot.rank = slot.version = -1
        return slot

    def _is_needed(self, slot: Slot) -> bool:
        """Whether all would go back to this; until that is established with the buddies of now, also an earlier's."""
        settled = self._established == self._needed
        return slot.version == self._needed >= 0 and not (settled and slot.rank not in (self._runtime.rank, self._ward))

    def _forget(self, slot: Slot) -> None:
        slot.complete = False
        if slot.offer is not None:
            self._runtime.server.drop_snapshot(slot.rank, slot.offer)
            slot.offer = None

    def _serve(self, slot: Slot, digests: dict[int, int]) -> None:
        """`digests`: by bucket, as far as they are known."""
        slot.offer = Offer(0, slot.version, slot.meta, SnapshotFlat(slot.tree, slot.paths, slot.tensors), digests)
        slot.complete = True
        self._runtime.server.keep_snapshot(slot.rank, slot.offer)

    def _take(self, slot: Slot, version: int) -> dict[int, torch.Tensor]:
        """Describe the state in `slot`; returns what is still to be copied, which does not change before a write.

        By its place among the slot's tensors.
        """
        runtime, state = self._runtime, self._state
        flat = state.replicated()
        private = runtime.page.read_private(version)
        assert private is not None  # kept in front of the barrier that the newest version came through
        tensors = [*flat.tensors, torch.frombuffer(bytearray(private), dtype=torch.uint8)]
        specs = [spec_of(tensor) for tensor in tensors]
        if [spec_of(tensor) for tensor in slot.tensors] != specs:
            old = itertools.chain(slot.tensors, itertools.repeat(None))
            slot.tensors = [_room(spec, tensor) for spec, tensor in zip(specs, old, strict=False)]
        slot.rank, slot.version = runtime.rank, version
        slot.tree, slot.paths = flat.tree, [*flat.paths, _PRIVATE_PATH]
        slot.meta = state.describe(self._progress.lineage, self._progress.until)
        steady = {local_part(parameter).data_ptr() for parameter in state.trained_parameters()}
        later = {}
        for index, (path, source) in enumerate(zip(slot.paths, tensors, strict=True)):
            if path.startswith("optimizers.") or source.data_ptr() in steady:
                later[index] = source
            else:  # buffers, averages: small, and forward may change them
                slot.tensors[index].copy_(source)
        return later

    def _complete(self, slot: Slot, digests: Sequence[int]) -> None:
        """All of it is copied: serve it. `digests`: of its buckets, without what is private."""
        flat = SnapshotFlat(slot.tree, slot.paths[:-1], slot.tensors[:-1])
        slot.meta["digest"] = digest_of(flat, digests)
        self._serve(slot, dict(enumerate(digests[:-1])))  # what is private goes into the last bucket as well

    def _fetch(self, slot: Slot, ward: int, version: int, generation: int) -> None:
        """Get the ward's snapshot. Raises StepInterrupted or RestoreError if the generation is closed meanwhile."""
        runtime = self._runtime
        (answer,) = runtime.store.wait(generation, (_key(ward),), None)
        address = msgspec.msgpack.decode(answer, type=Address)
        room = dict(zip(slot.paths, slot.tensors, strict=True))
        client = self._client = runtime.background_fetcher(self._spare)
        if not runtime.is_current(generation):
            raise StepInterrupted("the generation was closed before there was anything to cancel")
        try:
            fetched = client.fetch(generation, version, [address], room.get, of=ward)
        finally:
            self._client = None
        header = fetched.header
        slot.meta, slot.tree, slot.paths, slot.tensors = header.meta, header.tree, header.paths, fetched.tensors
        slot.rank, slot.version = ward, version
        self._serve(slot, fetched.digests)

    def _cancel(self) -> None:
        """The generation is closed. Called by the link's thread."""
        self._closed.set()
        if (client := self._client) is not None:
            client.cancel()

    # --- in a recovery --------------------------------------------------------------------------------------------
    def held(self) -> tuple[Snapshot, ...]:
        """What is in this process's memory, whole."""
        return tuple(
            Snapshot(rank=slot.rank, version=slot.version) for slot in (*self._own, *self._kept) if slot.complete
        )

    def own(self, version: int) -> Slot | None:
        """This rank's snapshot of `version`, if there is one."""
        return self._find(self._own, self._runtime.rank, version)

    def _find(self, slots: list[Slot], rank: int, version: int) -> Slot | None:
        found = (slot for slot in slots if slot.complete and (slot.rank, slot.version) == (rank, version))
        return next(found, None)

    def discard_after(self, version: int) -> None:
        """Newer versions are undone: no snapshot of them may ever be used, nor one that is being digested just now."""
        if self._thread is not None:
            self._thread.join()  # its generation is closed
        for slot in (*self._own, *self._kept):
            if slot.version > version:
                self._forget(slot)


def _key(rank: int) -> str:
    return f"buddy/{rank}"


def _room(spec: TensorSpec, old: torch.Tensor | None) -> torch.Tensor:
    """Host memory for one tensor: the old one if it fits."""
    if old is not None and spec_of(old) == spec:
        return old
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def _fill(slot: Slot, sources: Mapping[int, torch.Tensor]) -> list[int]:
    """Copy `sources` to their places in `slot`; returns the digests of its buckets, without what is private.

    One pass over memory, on this thread alone: torch's own copies would start as many as there are processors.
    """
    tensors, twins = slot.tensors[:-1], dict[int, int]()
    reading = list(tensors)
    for index, source in sources.items():
        if is_plain(source):
            reading[index], twins[index] = source, tensors[index].data_ptr()
        else:
            tensors[index].copy_(source)
    reader = TensorReader(reading)
    return [reader.copy(bucket, twins) for bucket in plan_state([spec_of(tensor) for tensor in tensors])]
