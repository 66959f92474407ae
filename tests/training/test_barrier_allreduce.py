"""The barrier's all-reduce: between ranks that share memory through that, between others through gloo."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from relight.errors import StepInterrupted
from relight.training.collectives.barrier_allreduce import BarrierAllReduce, SharedMemoryAllReduce
from relight.training.collectives.generation_group import GenerationGroup
from relight.training.torch_private.distributed.groups import make_generation_group
from relight.wire.memory.shared_barrier import MAX_NUMBERS, SharedBarrier

RANKS = 3
DEADLINE_SECONDS = 30.0


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """Descriptors of two boards: two hosts, each with its own."""
    numbers = [SharedBarrier.create(RANKS) for _ in range(2)]
    yield numbers
    for number in numbers:
        os.close(number)


class Members:
    """All ranks of a group, in this process, each on a thread of its own."""

    def __init__(self, boards: list[int | None]) -> None:
        self.reduced: list[int] = []  # lengths of what rank 0 handed to gloo
        store = HashStore()
        self._pool = ThreadPoolExecutor(RANKS)
        groups = self._pool.map(lambda rank: make_generation_group(store, rank, RANKS, "test", None), range(RANKS))
        self._generation_groups = [GenerationGroup(group) for group in groups]
        self.fences = [BarrierAllReduce(RANKS, self._local(boards[rank], rank)) for rank in range(RANKS)]

    def enter_all(self, rows: list[list[int]]) -> list[list[int]]:
        waits = [self.enter(rank, row) for rank, row in enumerate(rows)]
        return [wait.result(DEADLINE_SECONDS) for wait in waits]

    def enter(self, rank: int, row: list[int]) -> "Future[list[int]]":
        return self._pool.submit(self._go_through, rank, row)

    def _go_through(self, rank: int, row: list[int]) -> list[int]:
        def allreduce(tensor: torch.Tensor) -> object:
            if rank == 0:
                self.reduced.append(tensor.numel())
            return self._generation_groups[rank]._start_all_reduce(tensor)

        wait = self.fences[rank].enter(row, allreduce)
        return wait()

    @staticmethod
    def _local(descriptor: int | None, rank: int) -> SharedMemoryAllReduce | None:
        return None if descriptor is None else SharedMemoryAllReduce(SharedBarrier(descriptor, RANKS), 1, rank)


ROWS = [[1, 10, -1], [1, 20, 0], [1, 30, 5]]


def test_ranks_of_one_board_need_gloo_once(descriptors: list[int]) -> None:
    members = Members([descriptors[0]] * RANKS)
    for _ in range(5):
        assert members.enter_all(ROWS) == [[3, 60, 4]] * RANKS
    assert members.reduced == [3 + RANKS]


@pytest.mark.parametrize("missing", [None, "another"])
def test_ranks_that_do_not_all_share_one_use_gloo(descriptors: list[int], missing: str | None) -> None:
    members = Members([descriptors[0], descriptors[1] if missing else None, descriptors[0]])
    for _ in range(3):
        assert members.enter_all(ROWS) == [[3, 60, 4]] * RANKS
    assert members.reduced == [3 + RANKS, 3, 3]


def test_ranks_without_any_use_gloo() -> None:
    members = Members([None] * RANKS)
    for _ in range(2):
        assert members.enter_all(ROWS) == [[3, 60, 4]] * RANKS
    assert members.reduced == [3 + RANKS, 3]


def test_long_rows_go_through_gloo(descriptors: list[int]) -> None:
    members = Members([descriptors[0]] * RANKS)
    members.enter_all(ROWS)
    long = [[rank] * (MAX_NUMBERS + 1) for rank in range(RANKS)]
    assert members.enter_all(long) == [[3] * (MAX_NUMBERS + 1)] * RANKS
    assert members.enter_all(ROWS) == [[3, 60, 4]] * RANKS
    assert members.reduced == [3 + RANKS, MAX_NUMBERS + 1]


def test_nobody_passes_before_everybody_has_entered(descriptors: list[int]) -> None:
    members = Members([descriptors[0]] * RANKS)
    members.enter_all(ROWS)
    early = [members.enter(rank, ROWS[rank]) for rank in (0, 2)]
    assert not any(wait.done() for wait in early)
    late = members.enter(1, ROWS[1])
    assert [wait.result(DEADLINE_SECONDS) for wait in (*early, late)] == [[3, 60, 4]] * RANKS


def abandoned_while_it_waits(descriptor: int) -> Members:
    """Rank 0 entered, and was told that the generation is closed; the others have yet to enter."""
    members = Members([descriptor] * RANKS)
    members.enter_all(ROWS)
    early = members.enter(0, ROWS[0])
    members.fences[0].abandon()
    with pytest.raises(StepInterrupted):
        early.result(DEADLINE_SECONDS)
    return members


def test_who_waits_is_told_of_the_end_of_the_generation(descriptors: list[int]) -> None:
    members = abandoned_while_it_waits(descriptors[0])
    with pytest.raises(StepInterrupted):  # also who enters later
        members.enter(0, ROWS[0]).result(DEADLINE_SECONDS)


def test_it_completes_on_some_ranks_and_not_on_others(descriptors: list[int]) -> None:
    """A rank that was told of the end before the last one entered has no proof; the others have."""
    members = abandoned_while_it_waits(descriptors[0])
    others = [members.enter(rank, ROWS[rank]) for rank in (1, 2)]
    assert [wait.result(DEADLINE_SECONDS) for wait in others] == [[3, 60, 4]] * 2


def test_ranks_at_other_steps_find_out(descriptors: list[int]) -> None:
    """One of them has more to say there, a vote perhaps: the sums that they have in common are enough."""
    members = Members([descriptors[0]] * RANKS)
    members.enter_all(ROWS)
    assert members.enter_all([[1, 5], [1, 6, 0], [1, 5]]) == [[3, 16]] * RANKS


def test_waiting_takes_no_thread_from_others(descriptors: list[int]) -> None:
    """The wait releases the GIL: other threads of the rank, the link's above all, go on."""
    members = Members([descriptors[0]] * RANKS)
    members.enter_all(ROWS)
    waiting = members.enter(0, ROWS[0])
    ticks = threading.Event()
    threading.Thread(target=ticks.set, daemon=True).start()
    assert ticks.wait(DEADLINE_SECONDS)
    members.fences[0].abandon()
    with pytest.raises(StepInterrupted):
        waiting.result(DEADLINE_SECONDS)
