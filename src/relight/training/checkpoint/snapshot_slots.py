"""Memory for snapshots: slots that are filled, served to other ranks, and used again."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from relight.core.worker.snapshots import Slot
from relight.transfer.io.codec import Flat, TensorSpec, digest_of, is_plain, spec_of
from relight.transfer.restore.offer import Offer, plan_state
from relight.transfer.restore.server import RestoreServer
from relight.transfer.tensors.weights import TensorReader

PRIVATE_PATH = "\x00private"  # the last tensor of a snapshot: the rank-private state, as bytes


class SnapshotFlat(Flat):
    """A tree that was flattened before."""

    def __init__(self, tree: Any, paths: list[str], tensors: list[torch.Tensor]) -> None:
        self.tree, self.paths, self.tensors = tree, paths, tensors
        self._has_places = True  # it may have some: to look for them costs as much as to leave them out


@dataclass
class MemorySlot(Slot):
    """Room in host memory for one snapshot."""

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

    def serve(self, server: RestoreServer, digests: dict[int, int]) -> None:
        """Offer this snapshot, which is complete. `digests`: by bucket, as far as they are known."""
        self.offer = Offer(0, self.version, self.meta, SnapshotFlat(self.tree, self.paths, self.tensors), digests)
        self.complete = True
        server.keep_snapshot(self.rank, self.offer)

    def release(self, server: RestoreServer) -> None:
        """Offer this snapshot no longer: no rank reads it any more, and its contents are not to be used."""
        if self.offer is not None:
            server.drop_snapshot(self.rank, self.offer)
            self.offer = None
        self.clear()

    def copy_to(self, destination: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors: in those at `destination` that fit, else in new ones."""
        copies = []
        for path, kept in zip(self.paths, self.tensors, strict=True):
            own = destination.get(path)
            fits = own is not None and spec_of(own) == spec_of(kept)
            copies.append(own.copy_(kept) if own is not None and fits else kept.clone())
        return copies


def _room(spec: TensorSpec, old: torch.Tensor | None) -> torch.Tensor:
    """Host memory for one tensor: the old one if it fits."""
    if old is not None and spec_of(old) == spec:
        return old
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
