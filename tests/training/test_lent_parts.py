"""Parts of divided weights that a rank lends: read between two writes only, and never in the way of the training."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash

from relight.errors import TransferError
from relight.training.publish.lent_parts import LentParts
from relight.transfer.plan.division import ShardSpec, parts_of
from relight.transfer.plan.manifest import Entry, make_manifest
from relight.transfer.plan.plan import Bucket, plan_buckets
from relight.transfer.tensors.weights import PartSource

STALL_SECONDS = 60.0  # longer than any test may take
DEADLINE_SECONDS = 20.0
SIZE = 16  # of each tensor: without gaps between them
ENTRIES = [Entry("weight", "float32", (SIZE,)), Entry("running", "float32", (SIZE,))]


class Rank:
    """Weights of which this rank holds all, one of them a buffer that forward changes."""

    def __init__(self, place: Path, stall_seconds: float) -> None:
        parts = [*parts_of(0, (SIZE,), (0,), (SIZE,), 4), *parts_of(1, (SIZE,), (0,), (SIZE,), 4)]
        manifest = make_manifest(ENTRIES, tuple(parts))
        self.weight, self.running = torch.zeros(SIZE), torch.zeros(SIZE)
        source = PartSource(ShardSpec(manifest), {0: self.weight, 1: self.running}, changing=(1,))
        self.buckets = plan_buckets(manifest, 2**16)
        self.parts = LentParts(place, lambda: "", "rank-1", source, stall_seconds, token=b"", tls=None)
        self.pool = ThreadPoolExecutor(1)  # the link's thread

    def filled(self, bucket: Bucket) -> list[float]:
        """Return the content that the publisher gets of one of them."""
        view = bytearray(bucket.nbytes)
        assert self.parts.fill(bucket, memoryview(view)) == xxhash.xxh3_64_intdigest(view)
        return torch.frombuffer(view, dtype=torch.float32).tolist()

    def everything(self) -> set[float]:
        return {number for bucket in self.buckets for number in self.filled(bucket)}

    def close(self) -> None:
        self.parts.stop()
        self.pool.shutdown()


@contextlib.contextmanager
def rank_at(place: Path, stall_seconds: float = STALL_SECONDS) -> Iterator[Rank]:
    with contextlib.closing(Rank(place, stall_seconds)) as made:
        yield made


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_at(tmp_path) as made:
        yield made


def test_parts_are_those_of_the_version_that_is_held(rank: Rank) -> None:
    rank.weight.fill_(3)
    rank.running.fill_(3)
    rank.parts.hold(3)
    assert rank.parts.acquire(3) == ""
    rank.running.fill_(9)  # in forward
    assert rank.everything() == {3.0}
    rank.parts.hold(3)  # the step begins again
    assert rank.everything() == {3.0}


def test_another_version_is_refused_by_name(rank: Rank) -> None:
    rank.parts.hold(5)
    assert rank.parts.acquire(4) == "it holds version 5"
    with pytest.raises(TransferError, match="being written"):
        rank.everything()


def test_a_version_that_is_still_written_is_waited_for(rank: Rank) -> None:
    rank.parts.before_write()
    asked = rank.pool.submit(rank.parts.acquire, 6)
    rank.parts.hold(6)
    assert asked.result(DEADLINE_SECONDS) == ""


def test_a_write_waits_until_nothing_is_read(rank: Rank) -> None:
    rank.parts.hold(1)
    assert rank.parts.acquire(1) == ""
    writing = rank.pool.submit(rank.parts.before_write)
    assert rank.everything() == {0.0}
    assert not writing.done()
    rank.parts.release()
    writing.result(DEADLINE_SECONDS)
    with pytest.raises(TransferError, match="being written"):
        rank.everything()


def test_a_write_does_not_wait_for_a_slow_engine(tmp_path: Path) -> None:
    with rank_at(tmp_path, stall_seconds=0.01) as rank:
        rank.parts.hold(1)
        assert rank.parts.acquire(1) == ""
        rank.parts.before_write()
        with pytest.raises(TransferError, match="being written"):
            rank.everything()
        assert rank.parts.acquire(2) == "its weights are being written"


def test_a_version_that_is_undone_is_lent_no_longer(rank: Rank) -> None:
    rank.parts.hold(4)
    assert rank.parts.acquire(4) == ""
    rank.parts.withdraw()
    with pytest.raises(TransferError, match="being written"):
        rank.everything()
    rank.parts.hold(2)
    assert rank.parts.acquire(2) == ""


def test_a_rank_that_lends_no_more_keeps_no_publisher_waiting(rank: Rank) -> None:
    """Nor itself, at the end of the job, with a publisher that wants a version which was never to come."""
    rank.parts.hold(1)
    asked = rank.pool.submit(rank.parts.acquire, 7)
    while not asked.running():
        time.sleep(0)
    rank.parts.stop()
    assert asked.result(DEADLINE_SECONDS) == "its weights are being written"
