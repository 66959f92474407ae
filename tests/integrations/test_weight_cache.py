"""Weights that are collected beside an engine's work, and loaded when it is told to."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.errors import TransferError
from relight.integrations.engines.weight_cache import Pairs, WeightCache

SECONDS = 30.0
CPU = torch.device("cpu")


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[relight.Publisher]:
    with relight.Publisher(tmp_path, bucket_bytes=4096) as publisher:
        yield publisher


@pytest.fixture
def held(tmp_path: Path, publisher: relight.Publisher) -> Iterator[WeightCache]:
    held = WeightCache(tmp_path, name="engine")
    assert publisher.wait_for_engines(1, SECONDS)
    yield held
    held.close()


def weights(value: float) -> dict[str, torch.Tensor]:
    embedding = torch.full((100, 64), value)
    return {"embedding": embedding, "head": embedding, "scale": torch.tensor(value)}


def must_not_load(_: Pairs) -> None:
    pytest.fail("loaded")


def publish(publisher: relight.Publisher, version: int) -> None:
    publisher.publish(relight.TensorSource(weights(float(version))), version=version)


def test_the_named_version_is_loaded_with_every_name(publisher: relight.Publisher, held: WeightCache) -> None:
    publish(publisher, 3)
    loaded: dict[str, torch.Tensor] = {}
    held.load_into(loaded.update, version=3, device=CPU, timeout_seconds=SECONDS)
    assert relight.digest_weights(loaded) == relight.digest_weights(weights(3.0))


def test_what_was_loaded_is_the_engines_own(publisher: relight.Publisher, held: WeightCache) -> None:
    publish(publisher, 1)
    loaded: dict[str, torch.Tensor] = {}
    held.load_into(loaded.update, version=1, device=CPU, timeout_seconds=SECONDS)
    publish(publisher, 2)
    held.load_into(list, version=2, device=CPU, timeout_seconds=SECONDS)
    assert relight.digest_weights(loaded) == relight.digest_weights(weights(1.0))


def test_a_version_that_was_replaced_is_refused_before_anything_is_loaded(
    publisher: relight.Publisher, held: WeightCache
) -> None:
    publish(publisher, 1)
    publish(publisher, 2)
    with pytest.raises(TransferError, match="replaced by version 2"):
        held.load_into(must_not_load, version=1, device=CPU, timeout_seconds=SECONDS)
    held.load_into(list, version=2, device=CPU, timeout_seconds=SECONDS)


def test_a_version_that_does_not_come_is_said_to_be_missing(publisher: relight.Publisher, held: WeightCache) -> None:
    publish(publisher, 1)
    with pytest.raises(TransferError, match=r"version 7 did not come within 0\.1 s: version 1 is held"):
        held.load_into(must_not_load, version=7, device=CPU, timeout_seconds=0.1)
