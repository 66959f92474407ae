"""Messages between source and target of a restore, and the buckets of a state, for every fabric."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from relight.transfer.io.codec import Flat, TensorSpec
from relight.transfer.plan.manifest import Entry, Manifest, make_manifest
from relight.transfer.plan.plan import Bucket, plan_buckets
from relight.transfer.tensors.weights import TensorReader

BUCKET_BYTES = 4 * 2**20


class Request(msgspec.Struct, frozen=True, tag=True):
    """A target's request to a source."""

    generation: int
    version: int
    part: int
    parts: int
    of: int = -1  # the rank whose snapshot is wanted; -1: the source's own state, as it is on offer
    only_meta: bool = False  # no bucket is wanted


class Header(msgspec.Struct, frozen=True, tag=True):
    """The description of a state, before its buckets."""

    generation: int
    version: int
    meta: dict[str, Any]
    tree: Any
    paths: list[str]
    specs: list[TensorSpec]
    error: str = ""


class GrantBuffers(msgspec.Struct, frozen=True, tag=True):
    """Grant the source buffers of the target; their descriptors come with it."""

    buffer_bytes: int


class BucketReady(msgspec.Struct, frozen=True, tag=True):
    """A bucket is complete: in a buffer that both sides share, or its bytes came just before this."""

    bucket: int
    buffer: int
    digest: int


class BufferFree(msgspec.Struct, frozen=True, tag=True):
    """The target has taken the bucket out of the buffer; without shared buffers: it has everything."""

    buffer: int


ToSource = Request | GrantBuffers | BufferFree
ToTarget = Header | BucketReady


class Offer:
    """The state that a source serves during one generation."""

    def __init__(
        self, generation: int, version: int, meta: dict[str, Any], flat: Flat, digests: dict[int, int] | None = None
    ) -> None:
        """`digests`: by bucket, those that are known."""
        self.header = Header(generation, version, meta, flat.tree, flat.paths, flat.specs)
        self.reader = TensorReader(flat.tensors)
        self.buckets = plan_state(flat.specs)
        # Sending fills them from the front, the source's own state digest from the back.
        self.digests: dict[int, int] = {} if digests is None else digests


def describe_state(specs: Sequence[TensorSpec]) -> Manifest:
    """The manifest of a flattened state; a tensor's index is its only name. Raises UsageError if it cannot be."""
    return make_manifest(Entry(str(index), spec.dtype, spec.shape) for index, spec in enumerate(specs))


def plan_state(specs: Sequence[TensorSpec]) -> tuple[Bucket, ...]:
    """The buckets that a flattened state travels and is digested in. Raises UsageError if it cannot be."""
    return plan_buckets(describe_state(specs), BUCKET_BYTES)


def part_of(buckets: Sequence[Bucket], part: int, parts: int) -> list[Bucket]:
    """Return the buckets that one of several sources sends: every n-th."""
    return [bucket for bucket in buckets if bucket.index % parts == part]


class Halfway:
    """Calls once, in front of the bucket that crosses the middle of a transfer."""

    def __init__(self, buckets: Sequence[Bucket], call: Callable[[], None] | None) -> None:
        self._call = call
        self._half = sum(bucket.nbytes for bucket in buckets) // 2
        self._done = 0

    def pass_over(self, bucket: Bucket) -> None:
        if self._call is not None and self._done <= self._half < self._done + bucket.nbytes:
            self._call()
        self._done += bucket.nbytes
