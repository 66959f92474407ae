"""A whole set of weights in one piece of host memory, laid out as the buckets are: loading one is a single copy.

Buckets of divided weights carry parts of tensors, each of which is copied to its place.
"""

import contextlib
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
import xxhash

from relight.errors import TransferError
from relight.transfer.plan.manifest import Entry, Manifest, describe_bytes
from relight.transfer.plan.plan import Bucket, offsets_of
from relight.transfer.tensors.populate import populate
from relight.transfer.tensors.weights import address_of, allocate, bytes_at, copy_and_digest, dtype_of, load_pieces


class Staging:
    """Memory for the tensors of a manifest, and these tensors, each of which owns just its part of it."""

    def __init__(self, manifest: Manifest) -> None:
        """Raises TransferError: no memory, or a type that this torch lacks."""
        self.manifest = manifest
        self._offsets, nbytes = offsets_of(manifest)
        self._memory = _map(nbytes)
        self._start = address_of(self._memory)
        self._end = self._start + len(self._memory)
        self._is_divided = bool(manifest.parts)
        self._addresses = {index: self._start + offset for index, offset in enumerate(self._offsets)}
        self.tensors: dict[str, torch.Tensor] = {}
        for entry, offset in zip(manifest.entries, self._offsets, strict=True):
            self.tensors[entry.name] = self.tensors[entry.same_as] if entry.same_as else self._place(entry, offset)

    def load(self, bucket: Bucket, view: memoryview) -> int:
        """Take the bucket out of `view`; returns the digest of what arrived here."""
        if self._is_divided:
            return load_pieces(bucket, view, self._addresses)
        first = bucket.pieces[0]
        target = self._start + self._offsets[first.tensor] + first.start - first.offset
        digest = xxhash.xxh3_64()
        copy_and_digest(target, address_of(view), bytes_at(target, bucket.nbytes), digest)
        return digest.intdigest()

    def reuse_for(self, manifest: Manifest) -> bool:
        """Take buckets of these weights from now on, if they are the same tensors; return whether they are."""
        if manifest.entries != self.manifest.entries:
            return False
        self._is_divided = bool(manifest.parts)
        return True

    def populate(self, *, after: Sequence[threading.Thread] = ()) -> list[threading.Thread]:
        """Have the system find the memory in the background; return the threads that do so.

        Without this the first update that is loaded here waits for it: seconds for each GiB where memory is fragmented
        or the machine is a virtual one. `after`: see `populate.populate`; for memory that is not needed yet.
        """
        return populate(self, self._memory, after=after)

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every name with its tensor, tied ones too."""
        yield from self.tensors.items()

    def holds_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether one of them lies in this memory."""
        return any(self._start <= tensor.data_ptr() < self._end for tensor in tensors)

    def _place(self, entry: Entry, offset: int) -> torch.Tensor:
        if not entry.nbytes:
            return allocate(entry)
        dtype = dtype_of(entry)
        # Not a view of one large tensor: each has a storage of its own size, as a module's parameters have.
        flat = torch.frombuffer(self._memory, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=offset)
        return flat.view(entry.shape)


def _map(nbytes: int) -> memoryview:
    """Private memory, in huge pages where the system has them: the first update touches all of it."""
    try:
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise TransferError(f"no memory for a copy of the weights, {describe_bytes(nbytes)}") from error
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
