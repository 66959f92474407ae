"""Manifest to buckets: which bytes travel together. Pure, without torch."""

import functools
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from relight.errors import MissingPartsError, UsageError
from relight.transfer.plan.manifest import Entry, Manifest, Part

ALIGNMENT = 64  # of each piece in its bucket: any type can be viewed in place, and copies run at full speed
DEFAULT_BUCKET_BYTES = 32 * 2**20
# Where weights lie on a device: it moves 32 MiB in the time that its processes need to exchange a message.
DEVICE_BUCKET_BYTES = 256 * 2**20
_OVERLAP = 8  # buckets at least, if that leaves them large enough: there is nothing to overlap in one
_SMALL_BYTES = 2**20


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some bytes of one tensor, and where they lie in their bucket: there always side by side.

    In the tensor too, unless there is a `stride`: then they are runs of `run` bytes, `stride` bytes apart.
    """

    tensor: int  # index into the manifest's entries
    start: int  # first byte, counted in the tensor
    offset: int  # first byte, counted in the bucket
    nbytes: int
    run: int = 0
    stride: int = 0


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """The bytes that one buffer carries at a time."""

    index: int
    nbytes: int  # including the gaps that alignment leaves
    pieces: tuple[Piece, ...]
    group: int = 0  # of the parts that it carries (`manifest.Part`)


@functools.lru_cache(maxsize=4)  # the same weights go out again and again, and thousands of tensors take a while
def plan_buckets(manifest: Manifest, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Fill buckets of at most `bucket_bytes` with the tensors in their order; large ones span several buckets.

    So one huge embedding does not set the size of the buffers. Laid end to end, each of `bucket_bytes`, the buckets
    are one row of tensors in which every tensor lies in one piece (`offsets_of`); unless the manifest has parts: then
    each bucket carries parts of one group only. Raises UsageError unless `bucket_bytes` is a positive multiple of
    ALIGNMENT, and for parts that are not every byte once.
    """
    if bucket_bytes <= 0 or bucket_bytes % ALIGNMENT:
        raise UsageError(f"buckets of {bucket_bytes} bytes: choose a positive multiple of {ALIGNMENT}")
    parts = manifest.parts
    if parts:
        check_parts(manifest.entries, parts)
    else:
        parts = tuple(Part(i, 0, e.nbytes, e.nbytes, 1) for i, e in enumerate(manifest.entries) if e.nbytes)
    filling = _Filling(bucket_bytes)
    for part in parts:
        filling.add(part)
    return filling.finish()


class _Filling:
    """Buckets that are being filled, one for each group."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._full: list[Bucket] = []
        self._open: dict[int, tuple[list[Piece], int]] = {}  # by group: pieces, and bytes that are filled

    def add(self, part: Part) -> None:
        done = 0
        while done < part.nbytes:
            pieces, filled = self._open.setdefault(part.group, ([], 0))
            offset = -(-filled // ALIGNMENT) * ALIGNMENT
            if offset >= self._bucket_bytes:
                self._close(part.group)
                continue
            piece = _cut(part, done, offset, self._bucket_bytes - offset)
            pieces.append(piece)
            self._open[part.group] = pieces, offset + piece.nbytes
            done += piece.nbytes

    def finish(self) -> tuple[Bucket, ...]:
        for group in sorted(self._open):
            self._close(group)
        return tuple(self._full)

    def _close(self, group: int) -> None:
        pieces, filled = self._open.pop(group)
        self._full.append(Bucket(len(self._full), filled, tuple(pieces), group))


def _cut(part: Part, done: int, offset: int, room: int) -> Piece:
    """Return the piece after the first `done` bytes of a part, as long as there is room and one piece can be."""
    if part.count == 1 or part.run == part.stride:  # side by side
        return Piece(part.tensor, part.start + done, offset, min(part.nbytes - done, room))
    index, within = divmod(done, part.run)
    start = part.start + index * part.stride + within
    runs = 0 if within else min(part.count - index, room // part.run)
    if runs > 1:
        return Piece(part.tensor, start, offset, runs * part.run, part.run, part.stride)
    return Piece(part.tensor, start, offset, min(part.run - within, room))


def check_parts(entries: Sequence[Entry], parts: Sequence[Part]) -> None:
    """Raises UsageError unless the parts are every byte of the tensors, once; MissingPartsError if some are missing."""
    by_tensor: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        by_tensor[part.tensor].append(part)
    if any(not 0 <= tensor < len(entries) for tensor in by_tensor):
        raise UsageError("there are parts of a tensor that does not exist")
    for index, entry in enumerate(entries):
        own = by_tensor[index]
        if any(part.start < 0 or part.run <= 0 or part.count <= 0 or part.end > entry.nbytes for part in own):
            raise UsageError(f"{entry.name}: a part of it does not lie within its {entry.nbytes} bytes")
        found = sum(part.nbytes for part in own)
        if found < entry.nbytes:
            raise MissingPartsError(
                f"{entry.name}: {entry.nbytes - found} of {entry.nbytes} bytes are held by no source"
            )
        if found > entry.nbytes or not _are_apart(own):
            raise UsageError(f"{entry.name}: its parts overlap")


def _are_apart(parts: Sequence[Part]) -> bool:
    """True if no two parts of one tensor have a byte in common; parts of different strides are taken to have one.

    With one stride they are rectangles: bytes of a row, in some rows.
    """
    if len(parts) == 1:
        return True
    if len({part.stride for part in parts}) > 1:
        return False
    rectangles = []
    for part in parts:
        row, column = divmod(part.start, part.stride)
        if column + part.run > part.stride:
            return False
        rectangles.append((row, row + part.count, column, column + part.run))
    rectangles.sort()
    active: list[tuple[int, int, int, int]] = []
    for top, bottom, left, right in rectangles:
        active = [other for other in active if other[1] > top]
        if any(other[2] < right and left < other[3] for other in active):
            return False
        active.append((top, bottom, left, right))
    return True


def offsets_of(manifest: Manifest) -> tuple[list[int], int]:
    """Return the beginning of each tensor and the length of all, if the buckets of any size are laid end to end."""
    offsets, end = [], 0
    for entry in manifest.entries:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + entry.nbytes if entry.nbytes else end
    return offsets, end


def bucket_bytes_for(total_bytes: int, buffer_bytes: int) -> int:
    """Return the size of the buckets for an update of `total_bytes` through buffers of `buffer_bytes`.

    Each bucket costs every engine a message and an answer, so they are as large as the buffers; but few weights are
    cut into some buckets all the same, so that writing and reloading overlap.
    """
    wanted = max(_SMALL_BYTES, -(-total_bytes // (_OVERLAP * ALIGNMENT)) * ALIGNMENT)
    return min(wanted, buffer_bytes)
