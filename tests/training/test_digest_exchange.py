"""Digests that ranks add to a barrier's all-reduce so that each sees whether replicas of the state differ."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from relight.training.state.corruption import DigestExchange, differ, differing_tensors

Rank = tuple[str, str]  # the digest of its state, and which part of the state that is


def summed(ranks: list[Rank]) -> list[int]:
    entries = [
        DigestExchange(partial(str, digest)).entries(rank, len(ranks), shard)
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


def test_each_digest_stands_at_its_rank() -> None:
    assert summed([(A, ""), (B, "")]) == [int(A, 16) >> 4, int(B, 16) >> 4]


def named(ranks: list[tuple[dict[str, int], str]]) -> list[tuple[str, ...]]:
    """The answer to each rank that has these digests, of this part: all of them meet in every all-reduce."""
    rows: list[list[int]] = [[] for _ in ranks]
    meeting = threading.Barrier(len(ranks))

    def compare(rank: int) -> tuple[str, ...]:
        def add_up(row: list[int]) -> list[int]:
            rows[rank] = row
            meeting.wait(10)
            sums = [sum(column) for column in zip(*rows, strict=True)]
            meeting.wait(10)
            return sums

        try:
            return differing_tensors(*ranks[rank], rank, len(ranks), add_up)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(compare, range(len(ranks))))


def digests(*differing: str, names: str = "weight bias rest") -> dict[str, int]:
    return {name: number + 7 * (name in differing) << 56 for number, name in enumerate(names.split(), 1)}


def test_what_differs_is_named() -> None:
    assert named([(digests(), ""), (digests(), ""), (digests("bias"), "")]) == [("bias",)] * 3


def test_no_more_than_a_few_are_named() -> None:
    names = "a b c d e"
    assert named([(digests(names=names), ""), (digests(*"abcde", names=names), "")]) == [("a", "b", "c")] * 2


def test_only_tensors_of_the_same_part_are_compared_and_all_ranks_are_told_their_names() -> None:
    """As in a pipeline: the other part has other tensors, and more of them."""
    large = "up down left right"
    ranks = [
        (digests(), "1/2"),
        (digests("left", names=large), "2/2"),
        (digests(), "1/2"),
        (digests(names=large), "2/2"),
    ]
    assert named(ranks) == [("left",)] * 4


def test_of_two_parts_that_differ_the_first_is_named() -> None:
    ranks = [(digests(), "1/2"), (digests(), "2/2"), (digests("rest"), "1/2"), (digests("weight"), "2/2")]
    assert named(ranks) == [("rest",)] * 4


def test_a_part_with_one_holder_differs_from_nobody() -> None:
    assert named([(digests(), "1/2"), (digests("bias"), "2/2")]) == [()] * 2


def test_other_tensors_are_not_compared_with_each_other() -> None:
    assert named([(digests(), ""), (digests(names="weight other rest"), "")]) == [("which tensors there are",)] * 2
