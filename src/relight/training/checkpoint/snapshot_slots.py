"""Memory for snapshots: slots that are filled, served to other ranks, found again, and reused."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from relight.core.events import Snapshot
from relight.transfer.io.codec import Flat, TensorSpec, digest_of, is_plain, spec_of
from relight.transfer.restore.offer import Offer, plan_state
from relight.transfer.restore.server import RestoreServer
from relight.transfer.tensors.weights import TensorReader

PRIVATE_PATH = "\x00private"  # the last tensor of a snapshot: the rank-private state, as bytes
_SLOTS = 2  # of each kind, as long as buddies stay the same


class SnapshotFlat(Flat):
    """A tree that was flattened before."""

    def __init__(self, tree: Any, paths: list[str], tensors: list[torch.Tensor]) -> None:
        self.tree, self.paths, self.tensors = tree, paths, tensors


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

    def make_room(self, specs: Sequence[TensorSpec]) -> None:
        """Have tensors of these specs, the present ones where they fit."""
        if [spec_of(tensor) for tensor in self.tensors] != specs:
            old = itertools.chain(self.tensors, itertools.repeat(None))
            self.tensors = [_room(spec, tensor) for spec, tensor in zip(specs, old, strict=False)]

    def fill(self, sources: Mapping[int, torch.Tensor]) -> list[int]:
        """Copy `sources`, by their places among the tensors; return the digests of all buckets but for private state.

        One pass over memory, on this thread alone: torch's own copies would start as many as there are processors.
        """
        tensors, twins = self.tensors[:-1], dict[int, int]()
        reading = list(tensors)
        for index, source in sources.items():
            if is_plain(source):
                reading[index], twins[index] = source, tensors[index].data_ptr()
            else:
                tensors[index].copy_(source)
        reader = TensorReader(reading)
        return [reader.copy(bucket, twins) for bucket in plan_state([spec_of(tensor) for tensor in tensors])]

    def digest(self, digests: Sequence[int]) -> str:
        """Return the digest of the replicated state, made of those of its buckets."""
        return digest_of(SnapshotFlat(self.tree, self.paths[:-1], self.tensors[:-1]), digests)

    def copy_to(self, destination: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors: in those at `destination` that fit, else in new ones."""
        copies = []
        for path, kept in zip(self.paths, self.tensors, strict=True):
            own = destination.get(path)
            fits = own is not None and spec_of(own) == spec_of(kept)
            copies.append(own.copy_(kept) if own is not None and fits else kept.clone())
        return copies


class SlotPool:
    """This rank's own snapshots, and those that it keeps for its ward. Complete ones are served to other ranks."""

    def __init__(self, server: RestoreServer) -> None:
        self._server = server
        self._own = [Slot() for _ in range(_SLOTS)]
        self._kept = [Slot() for _ in range(_SLOTS)]
        self._needed = -1  # the version that all ranks would go back to
        self._holders: tuple[int, ...] | None = None  # whose snapshots of it are needed; None: also an earlier ward's

    def need(self, version: int, holders: tuple[int, ...] | None) -> None:
        """Keep the snapshots of `version`: those of `holders`, or, not established yet, all of them (None)."""
        self._needed, self._holders = version, holders
        if holders is not None:
            self._kept.sort(key=self._is_needed, reverse=True)
            for slot in self._kept[_SLOTS:]:  # of earlier wards
                self.release(slot)
            del self._kept[_SLOTS:]

    def free_own(self) -> Slot:
        """Return a slot for a snapshot of this rank. No rank reads it any more."""
        return self._free(self._own)

    def free_kept(self) -> Slot:
        """Return a slot for a snapshot of the ward. No rank reads it any more."""
        return self._free(self._kept)

    def find_own(self, rank: int, version: int) -> Slot | None:
        """Return the complete snapshot that this process took as `rank`, or None."""
        return _find(self._own, rank, version)

    def find_kept(self, rank: int, version: int) -> Slot | None:
        """Return the complete snapshot that is kept for `rank`, or None."""
        return _find(self._kept, rank, version)

    def serve(self, slot: Slot, digests: dict[int, int]) -> None:
        """Offer a complete snapshot. `digests`: by bucket, as far as they are known."""
        slot.offer = Offer(0, slot.version, slot.meta, SnapshotFlat(slot.tree, slot.paths, slot.tensors), digests)
        slot.complete = True
        self._server.keep_snapshot(slot.rank, slot.offer)

    def release(self, slot: Slot) -> None:
        """Offer a snapshot no longer: its contents are not to be used."""
        slot.complete = False
        if slot.offer is not None:
            self._server.drop_snapshot(slot.rank, slot.offer)
            slot.offer = None

    def discard_after(self, version: int) -> None:
        """Release the snapshots of newer versions."""
        for slot in (*self._own, *self._kept):
            if slot.version > version:
                self.release(slot)

    def held(self) -> tuple[Snapshot, ...]:
        """Return rank and version of each complete snapshot."""
        slots = (*self._own, *self._kept)
        return tuple(Snapshot(rank=slot.rank, version=slot.version) for slot in slots if slot.complete)

    def _free(self, slots: list[Slot]) -> Slot:
        free = [slot for slot in slots if not self._is_needed(slot)]
        if not free:
            free = [Slot()]
            slots += free
        slot = min(free, key=lambda slot: (slot.complete, slot.version))
        self.release(slot)
        slot.rank = slot.version = -1
        return slot

    def _is_needed(self, slot: Slot) -> bool:
        return slot.version == self._needed >= 0 and (self._holders is None or slot.rank in self._holders)


def _find(slots: list[Slot], rank: int, version: int) -> Slot | None:
    found = (slot for slot in slots if slot.complete and (slot.rank, slot.version) == (rank, version))
    return next(found, None)


def _room(spec: TensorSpec, old: torch.Tensor | None) -> torch.Tensor:
    """Host memory for one tensor: the old one if it fits."""
    if old is not None and spec_of(old) == spec:
        return old
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
