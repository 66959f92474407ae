"""The fuzzer's findings, said again to a real controller: what once broke it, and what takes a way of its own."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.wire.connection.framing import encode_frame
from tests.wire.bending import bend
from tests.wire.session import MESSAGES, TRAINING, Judge, seeds

CORPUS = sorted(path for path in (Path(__file__).parent / "corpus").iterdir())


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as one:
        yield one


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_found(judge: Judge, path: Path) -> None:
    assert not judge.judge(path.read_bytes())


def test_what_makes_sense(judge: Judge) -> None:
    for name, data in seeds().items():
        assert not judge.judge(data), name


def test_every_value_of_every_message_bent(judge: Judge) -> None:
    chance = random.Random(20_261_121)
    for message in MESSAGES:
        payload = encode_frame(message)[4:]
        for _ in range(3):
            bent = bend(payload, chance)
            if bent is not None:
                data = bytes([TRAINING]) + len(bent).to_bytes(4, "big") + bent
                assert not judge.judge(data), data
