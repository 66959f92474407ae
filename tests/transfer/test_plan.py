"""Buckets: each byte exactly once, in order, aligned, and no bucket over its size."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import UsageError
from relight.transfer.plan.manifest import Entry, Manifest, make_manifest
from relight.transfer.plan.plan import ALIGNMENT, offsets_of, plan_buckets
from tests.transfer.test_manifest import manifests

bucket_sizes = st.integers(1, 40).map(lambda count: count * ALIGNMENT)


@given(manifests(), bucket_sizes)
def test_each_byte_of_each_tensor_once_and_in_order(manifest: Manifest, bucket_bytes: int) -> None:
    moved: dict[int, int] = {}  # tensor -> bytes so far
    last = -1
    for bucket in plan_buckets(manifest, bucket_bytes):
        for piece in bucket.pieces:
            assert piece.tensor >= last
            assert piece.start == moved.get(piece.tensor, 0)
            moved[piece.tensor] = piece.start + piece.nbytes
            last = piece.tensor
    assert moved == {index: entry.nbytes for index, entry in enumerate(manifest.entries) if entry.nbytes}


@given(manifests(), bucket_sizes)
def test_pieces_are_aligned_and_lie_side_by_side(manifest: Manifest, bucket_bytes: int) -> None:
    for index, bucket in enumerate(plan_buckets(manifest, bucket_bytes)):
        assert bucket.index == index
        assert 0 < bucket.nbytes <= bucket_bytes
        assert bucket.pieces[0].offset == 0
        assert all(piece.nbytes > 0 and piece.offset % ALIGNMENT == 0 for piece in bucket.pieces)
        for piece, after in pairwise(bucket.pieces):
            assert 0 <= after.offset - (piece.offset + piece.nbytes) < ALIGNMENT
        assert bucket.pieces[-1].offset + bucket.pieces[-1].nbytes == bucket.nbytes


@given(manifests(), bucket_sizes)
def test_laid_end_to_end_each_tensor_lies_in_one_piece(manifest: Manifest, bucket_bytes: int) -> None:
    offsets, nbytes = offsets_of(manifest)
    end = 0
    for bucket in plan_buckets(manifest, bucket_bytes):
        for piece in bucket.pieces:
            assert bucket.index * bucket_bytes + piece.offset == offsets[piece.tensor] + piece.start
        end = bucket.index * bucket_bytes + bucket.nbytes
    assert end == nbytes


@given(manifests(), bucket_sizes)
def test_buckets_are_full_but_for_alignment(manifest: Manifest, bucket_bytes: int) -> None:
    for bucket in plan_buckets(manifest, bucket_bytes)[:-1]:
        assert bucket_bytes - bucket.nbytes < ALIGNMENT


def test_a_large_tensor_spans_buckets() -> None:
    manifest = make_manifest([Entry("small", "uint8", (10,)), Entry("huge", "uint8", (300,))])
    buckets = plan_buckets(manifest, 128)
    assert [bucket.nbytes for bucket in buckets] == [128, 128, 108]
    assert [(p.tensor, p.start, p.offset, p.nbytes) for b in buckets for p in b.pieces] == [
        (0, 0, 0, 10),
        (1, 0, 64, 64),
        (1, 64, 0, 128),
        (1, 192, 0, 108),
    ]


def test_nothing_to_move_makes_no_bucket() -> None:
    assert plan_buckets(make_manifest([])) == ()
    assert plan_buckets(make_manifest([Entry("empty", "float32", (0, 4))])) == ()


@pytest.mark.parametrize("size", [0, -64, 63, 65])
def test_bucket_sizes_that_cannot_be_aligned(size: int) -> None:
    with pytest.raises(UsageError, match="positive multiple of 64"):
        plan_buckets(make_manifest([]), size)
