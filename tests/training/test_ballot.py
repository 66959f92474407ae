"""What ranks add to a barrier's all-reduce so that each sees whether replicas of the state differ."""

import pytest

from relight.training.corruption import Ballot, differ

Rank = tuple[str, str]  # the digest of its state, and which part of the state that is


def summed(ranks: list[Rank], version: int = 10) -> list[int]:
    entries = [
        Ballot(5, lambda digest=digest: digest, lambda shard=shard: shard).entries(version, rank, len(ranks))  # type: ignore[misc]
        for rank, (digest, shard) in enumerate(ranks)
    ]
    return [sum(column) for column in zip(*entries, strict=True)]


A, B, C = "a" * 16, "b" * 16, "c" * 16


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([(A, ""), (A, ""), (A, "")], False),
        ([(A, ""), (A, ""), (B, "")], True),
        ([(A, "1/2"), (B, "2/2"), (A, "1/2"), (B, "2/2")], False),
        ([(A, "1/2"), (B, "2/2"), (A, "1/2"), (C, "2/2")], True),
        ([(A, "1/2"), (A, "2/2"), (A, "1/2"), (A, "2/2")], False),
        ([(A, "1/2"), (B, "2/2")], False),
    ],
)
def test_only_holders_of_the_same_part_are_compared(ranks: list[Rank], expected: bool) -> None:
    assert differ(summed(ranks), len(ranks)) is expected


def test_most_steps_compare_nothing() -> None:
    assert summed([(A, "1/2"), (B, "1/2")], version=11) == []
    assert differ([], 2) is False


def test_each_digest_stands_at_its_rank() -> None:
    assert summed([(A, ""), (B, "")]) == [int(A, 16) >> 4, int(B, 16) >> 4]
