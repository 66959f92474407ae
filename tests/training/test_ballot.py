"""What ranks add to a barrier's all-reduce so that each sees whether replicas of the state differ."""

import pytest

from relight.training.corruption import Ballot, differ, differing_tensors

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


def test_what_differs_is_named() -> None:
    """Three ranks; each adds its rows to those of the others."""
    held = [{"weight": 1 << 60, "bias": 2 << 60, "rest": 3 << 60} for _ in range(3)]
    held[2]["bias"] = 7 << 60

    def named(rank: int) -> tuple[str, ...]:
        rows: dict[int, list[list[int]]] = {}

        def collect(row: list[int]) -> list[int]:
            rows.setdefault(len(row), []).append(row)
            return [1] * len(row)

        for number, own in enumerate(held):
            differing_tensors(own, number, 3, collect)
        return differing_tensors(
            held[rank], rank, 3, lambda row: [sum(column) for column in zip(*rows[len(row)], strict=True)]
        )

    assert [named(rank) for rank in range(3)] == [("bias",)] * 3


def test_other_tensors_are_not_compared_with_each_other() -> None:
    assert differing_tensors({"weight": 1}, 0, 2, lambda row: [row[0], row[0] + 1]) == ("which tensors there are",)


def test_the_first_step_is_compared_whatever_was_asked_for() -> None:
    ballot = Ballot(0, lambda: A, lambda: "")
    assert ballot.entries(1, 0, 2) == []
    assert ballot.entries(1, 0, 2, first=True) == [int(A, 16) >> 4, 0]
