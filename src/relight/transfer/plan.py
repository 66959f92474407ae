"""Manifest to buckets: which bytes travel together. Pure, without torch."""

import functools

import msgspec

from relight.errors import UsageError
from relight.transfer.manifest import Manifest

ALIGNMENT = 64  # of each piece in its bucket: any type can be viewed in place, and copies run at full speed
DEFAULT_BUCKET_BYTES = 32 * 2**20
_OVERLAP = 8  # buckets at least, if that leaves them large enough: there is nothing to overlap in one
_SMALL_BYTES = 2**20


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some bytes of one tensor, and where they lie in their bucket."""

    tensor: int  # index into the manifest's entries
    start: int  # first byte, counted in the tensor
    offset: int  # first byte, counted in the bucket
    nbytes: int


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """What one buffer carries at a time."""

    index: int
    nbytes: int  # including the gaps that alignment leaves
    pieces: tuple[Piece, ...]


@functools.lru_cache(maxsize=4)  # the same weights go out again and again, and thousands of tensors take a while
def plan_buckets(manifest: Manifest, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Fill buckets of at most `bucket_bytes` with the tensors in their order; large ones span several buckets.

    So one huge embedding does not set the size of the buffers. Laid end to end, each of `bucket_bytes`, the buckets
    are one row of tensors in which every tensor lies in one piece (`offsets_of`). Raises UsageError unless
    `bucket_bytes` is a positive multiple of ALIGNMENT.
    """
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise UsageError(f"buckets of {bucket_bytes} bytes: choose a positive multiple of {ALIGNMENT}")
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    filled = 0
    for tensor, entry in enumerate(manifest.entries):
        done, nbytes = 0, entry.nbytes
        while done < nbytes:
            offset = -(-filled // ALIGNMENT) * ALIGNMENT
            if offset >= bucket_bytes:
                buckets.append(Bucket(len(buckets), filled, tuple(pieces)))
                pieces, filled, offset = [], 0, 0
            count = min(nbytes - done, bucket_bytes - offset)
            pieces.append(Piece(tensor, done, offset, count))
            filled = offset + count
            done += count
    if pieces:
        buckets.append(Bucket(len(buckets), filled, tuple(pieces)))
    return tuple(buckets)


def offsets_of(manifest: Manifest) -> tuple[list[int], int]:
    """Where each tensor begins, and how long all is, if the buckets of any size are laid end to end."""
    offsets, end = [], 0
    for entry in manifest.entries:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + entry.nbytes if entry.nbytes else end
    return offsets, end


def bucket_bytes_for(total_bytes: int, buffer_bytes: int) -> int:
    """How large to make the buckets of an update of `total_bytes` through buffers of `buffer_bytes`.

    Each bucket costs every engine a message and an answer, so they are as large as the buffers; but few weights are
    cut into some buckets all the same, so that writing and reloading overlap.
    """
    wanted = max(_SMALL_BYTES, -(-total_bytes // (_OVERLAP * ALIGNMENT)) * ALIGNMENT)
    return min(wanted, buffer_bytes)
