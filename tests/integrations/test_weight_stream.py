"""Updates whose tensors are made one by one, sent to a real receiver."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.errors import UsageError
from relight.integrations.engines.weight_stream import entry_of, send_stream
from relight.transfer.plan.manifest import Entry

SECONDS = 30.0
SHAPES = {"embedding": (64, 64), "bias": (3,), "nothing": (0, 4), "scale": (), "head": (64, 64), "end": (0,)}


def weights(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


ENTRIES = [entry_of(name, torch.float32, shape) for name, shape in SHAPES.items()]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[relight.Publisher]:
    with relight.Publisher(tmp_path, bucket_bytes=4096) as publisher:
        yield publisher


@pytest.fixture
def engine(tmp_path: Path, publisher: relight.Publisher) -> Iterator[relight.Receiver]:
    with relight.Receiver(tmp_path, model=weights(0.0)) as receiver:
        assert publisher.wait_for_engines(1, SECONDS)
        yield receiver


def test_an_engine_gets_what_was_made_and_few_tensors_exist_at_a_time(
    publisher: relight.Publisher, engine: relight.Receiver
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def tensors(value: float) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, shape in SHAPES.items():
            tensor = torch.full(shape, value)
            made.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            gc.collect()
            most = max(most, sum(each() is not None for each in made))

    for version in (1, 2):
        result = send_stream(publisher, ENTRIES, tensors(float(version)), version=version)
        assert result.error == ""
        assert engine.wait_for(version, SECONDS)
        assert engine.digest() == relight.digest_weights(weights(float(version)))
    assert most <= 3  # one that is read, one that waits, one that was just made


@pytest.mark.parametrize(
    "entries",
    [
        [*ENTRIES[:1], entry_of("bias", torch.float32, (4,)), *ENTRIES[2:]],
        ENTRIES[:-1],
        [*ENTRIES, entry_of("more", torch.float32, (5,))],
    ],
    ids=["another shape", "one too many", "one too few"],
)
def test_tensors_that_were_not_described_are_refused_and_the_engine_keeps_its_version(
    entries: list[Entry], publisher: relight.Publisher, engine: relight.Receiver
) -> None:
    with pytest.raises(UsageError, match="described"):
        send_stream(publisher, entries, weights(7.0).items(), version=7)
    assert send_stream(publisher, ENTRIES, weights(8.0).items(), version=8).error == ""
    assert engine.wait_for(8, SECONDS)
    assert engine.digest() == relight.digest_weights(weights(8.0))


def test_an_error_while_tensors_are_made_ends_the_update_alone(
    publisher: relight.Publisher, engine: relight.Receiver
) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embedding", torch.zeros(64, 64)
        raise RuntimeError("a gather failed")

    with pytest.raises(RuntimeError, match="a gather failed"):
        send_stream(publisher, ENTRIES, tensors(), version=1)
    assert engine.version == -1
    assert send_stream(publisher, ENTRIES, weights(2.0).items(), version=2).error == ""
    assert engine.wait_for(2, SECONDS)


def test_without_an_engine_all_tensors_are_made_all_the_same(publisher: relight.Publisher) -> None:
    """Other ranks take part in making them."""
    tensors = iter(weights(1.0).items())
    assert "no engine" in send_stream(publisher, ENTRIES, tensors, version=1).error
    assert next(tensors, None) is None
