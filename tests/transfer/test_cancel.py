"""An update that its owner gives up: engines keep what they have, and the next one goes through."""

import threading
from pathlib import Path

import pytest
import torch

import relight
from relight.transfer.plan.plan import Bucket
from relight.transfer.tensors.lent_weights import LentWeights
from relight.transfer.tensors.weights import TensorSource
from tests.transfer.test_source import SECONDS, fleet, weights


class Held(TensorSource):
    """Stands still in the middle of a bucket until it is released."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.reached, self.released = threading.Event(), threading.Event()

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        if bucket.index == 3:
            self.reached.set()
            assert self.released.wait(SECONDS)
        return super().fill(bucket, view)


class HeldLender(LentWeights):
    """Stands still in the middle of a bucket that is lent."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.reached, self.released = threading.Event(), threading.Event()

    def lend(self, bucket: Bucket) -> int:
        if bucket.index == 3:
            self.reached.set()
            assert self.released.wait(SECONDS)
        return super().lend(bucket)


@pytest.mark.parametrize("kind", [Held, HeldLender])
def test_an_update_given_up_in_the_middle_changes_nothing(tmp_path: Path, kind: type[Held | HeldLender]) -> None:
    with fleet(tmp_path) as (publisher, receiver):
        before = receiver.digest()
        source = kind(weights())
        handle = publisher.begin(source, version=3, confirmed=False)
        assert source.reached.wait(SECONDS)
        handle.cancel("the owner wants to write")  # returns although the writer stands still
        result = handle.wait(SECONDS)
        assert result is not None
        assert result.error == "the owner wants to write"
        assert (receiver.version, receiver.digest()) == (-1, before)
        following = publisher.begin(TensorSource(weights(1)), version=4)
        source.released.set()
        result = following.wait(SECONDS)
        assert result is not None
        assert result.engines == ("engine",)
        assert receiver.wait_for(4, SECONDS)
        assert receiver.digest() == relight.digest_weights(weights(1))


def test_an_update_that_engines_hold_can_be_abandoned_until_it_is_confirmed(tmp_path: Path) -> None:
    with fleet(tmp_path) as (publisher, receiver):
        before = receiver.digest()
        handle = publisher.begin(TensorSource(weights()), version=3, confirmed=False)
        assert handle.wait_until_read(SECONDS)
        handle.abandon("it will not last")
        result = handle.wait(SECONDS)
        assert result is not None
        assert result.error == "it will not last"
        assert (receiver.version, receiver.digest()) == (-1, before)
        handle = publisher.begin(TensorSource(weights(1)), version=4)
        handle.abandon("too late, or not")
        result = handle.wait(SECONDS)
        assert result is not None
        if result.engines:  # all of it was there in time, and it was confirmed from the beginning
            assert receiver.wait_for(4, SECONDS)
        else:
            assert (receiver.version, receiver.digest()) == (-1, before)


def test_an_update_that_engines_hold_is_not_given_up(tmp_path: Path) -> None:
    with fleet(tmp_path) as (publisher, receiver):
        handle = publisher.begin(TensorSource(weights()), version=3, confirmed=False)
        assert handle.wait_until_read(SECONDS)
        handle.cancel("too late")
        handle.confirm()
        result = handle.wait(SECONDS)
        assert result is not None
        assert result.engines == ("engine",)
        assert receiver.wait_for(3, SECONDS)
