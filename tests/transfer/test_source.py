"""Processes that hold the same weights as the publisher lend it a hand, and take turns with it."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.errors import TransferError
from relight.transfer.plan.plan import Bucket
from relight.transfer.plan.update.result import SELF
from relight.transfer.publish.source import SourceLink
from relight.transfer.tensors.weights import TensorSource

SECONDS = 30.0
BUCKET_BYTES = 64 * 1024


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(100, 1000, generator=generator) for index in range(8)}


@contextlib.contextmanager
def joined(publisher: relight.Publisher, link: SourceLink) -> Iterator[threading.Thread]:
    """The link, serving on a thread of its own; over at the end."""
    others = len(publisher.sources())
    thread = threading.Thread(target=link.run)
    thread.start()
    try:
        assert publisher.wait_for_sources(others + 1, SECONDS)
        yield thread
    finally:
        link.stop()
        thread.join(SECONDS)
        assert not thread.is_alive()


@contextlib.contextmanager
def fleet(place: Path) -> Iterator[tuple[relight.Publisher, relight.Receiver]]:
    model = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    with (
        relight.Publisher(place, bucket_bytes=BUCKET_BYTES, stall_timeout_seconds=SECONDS) as publisher,
        relight.Receiver(place, model=model, name="engine") as receiver,
    ):
        assert publisher.wait_for_engines(1, SECONDS)
        yield publisher, receiver


def test_sources_take_turns(tmp_path: Path) -> None:
    with (
        fleet(tmp_path) as (publisher, receiver),
        joined(publisher, SourceLink(tmp_path, TensorSource(weights()), version=3, name="a")),
        joined(publisher, SourceLink(tmp_path, TensorSource(weights()), version=3, name="b")),
    ):
        result = publisher.publish(TensorSource(weights()), version=3)
        assert result.engines == ("engine",)
        assert not result.dropped
        written = {stage.bucket: stage.member for stage in result.stages if stage.kind == "broadcast"}
        assert len(written) == result.buckets
        assert {written[bucket] for bucket in range(3)} == {SELF, "a", "b"}
        assert all(written[bucket] == written[bucket % 3] for bucket in written)
        assert receiver.wait_for(3, SECONDS)
        assert receiver.digest() == relight.digest_weights(weights())


def test_a_source_of_another_version_is_left_out(tmp_path: Path) -> None:
    with (
        fleet(tmp_path) as (publisher, receiver),
        joined(publisher, SourceLink(tmp_path, TensorSource(weights(1)), version=2, name="late")),
    ):
        result = publisher.publish(TensorSource(weights()), version=3)
        assert result.dropped == {"late": "it holds version 2"}
        assert receiver.wait_for(3, SECONDS)
        assert receiver.digest() == relight.digest_weights(weights())


def test_a_source_with_other_tensors_is_left_out(tmp_path: Path) -> None:
    fewer = weights()
    del fewer["layer.3"]
    with (
        fleet(tmp_path) as (publisher, _),
        joined(publisher, SourceLink(tmp_path, TensorSource(fewer), version=3, name="other")),
    ):
        result = publisher.publish(TensorSource(weights()), version=3)
        assert set(result.dropped) == {"other"}
        assert "layer.3" in result.dropped["other"]


class Ending(TensorSource):
    """Ends its link in the middle: what it was to write is written by another."""

    link: SourceLink

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        if bucket.index > 8:
            self.link.stop()
        return super().fill(bucket, view)


def test_a_source_that_is_lost_is_made_up_for(tmp_path: Path) -> None:
    source = Ending(weights())
    link = source.link = SourceLink(tmp_path, source, version=3, name="ending")
    with fleet(tmp_path) as (publisher, receiver), joined(publisher, link):
        result = publisher.publish(TensorSource(weights()), version=3)
        assert set(result.dropped) == {"ending"}
        assert result.engines == ("engine",)
        assert receiver.wait_for(3, SECONDS)
        assert receiver.digest() == relight.digest_weights(weights())


class Failing(TensorSource):
    """Runs into an error that a source may meet: the disk, say."""

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        if bucket.index > 8:
            raise OSError("the disk is gone")
        return super().fill(bucket, view)


class Unsettled(TensorSource):
    """Its device fails before anything can be read."""

    def __init__(self) -> None:
        self._is_there = True
        super().__init__(weights())
        self._is_there = False

    def settle(self) -> None:
        if not self._is_there:
            raise RuntimeError("the device is gone")


@pytest.mark.parametrize(
    ("make", "why"), [(lambda: Failing(weights()), "the disk is gone"), (Unsettled, "the device is gone")]
)
def test_a_source_that_fails_says_why(tmp_path: Path, make: Callable[[], TensorSource], why: str) -> None:
    with (
        fleet(tmp_path) as (publisher, receiver),
        joined(publisher, SourceLink(tmp_path, make(), version=3, name="failing")),
    ):
        result = publisher.publish(TensorSource(weights()), version=3)
        assert why in result.dropped["failing"]
        assert receiver.wait_for(3, SECONDS)
        assert receiver.digest() == relight.digest_weights(weights())


def test_without_a_publisher_a_source_says_so(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="no publisher"):
        SourceLink(tmp_path, TensorSource(weights()), version=1).run()
