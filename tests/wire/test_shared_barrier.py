"""A posted row is read whole or not at all, by all ranks, also after its writer's death; no waiter misses it."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from relight.wire.memory.shared_barrier import _ENTRIES_OFFSET, MAX_NUMBERS, SharedBarrier

RANKS = 3
DEADLINE_SECONDS = 60
ROUNDS = 2000


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = SharedBarrier.create(RANKS)
    yield number
    os.close(number)


def in_a_process(work: Callable[[], None]) -> int:
    """Fork; the child's status tells whether `work` raised."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(DEADLINE_SECONDS)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def test_a_row_is_seen_by_all_in_its_round_and_generation_only(descriptor: int) -> None:
    one, other = SharedBarrier(descriptor, RANKS), SharedBarrier(descriptor, RANKS)
    one.post(1, 7, 1, [1, -5, 2**62])
    assert other.row(1, 7, 1) == (1, -5, 2**62)
    assert other.token == one.token
    for rank, generation, number in [(0, 7, 1), (1, 7, 2), (1, 7, 3), (1, 8, 1), (1, 15, 1)]:
        assert other.row(rank, generation, number) is None


def test_a_row_stays_until_its_rank_is_two_rounds_ahead(descriptor: int) -> None:
    """It gets one round ahead of a rank that has yet to look; no further, without that rank."""
    shared_barrier = SharedBarrier(descriptor, RANKS)
    shared_barrier.post(0, 1, 1, [1])
    shared_barrier.post(0, 1, 2, [2])
    assert (shared_barrier.row(0, 1, 1), shared_barrier.row(0, 1, 2)) == ((1,), (2,))
    shared_barrier.post(0, 1, 3, [3])
    assert shared_barrier.row(0, 1, 1) is None


def test_a_row_stays_after_its_process(descriptor: int) -> None:
    pid = in_a_process(lambda: SharedBarrier(descriptor, RANKS).post(2, 1, 1, [42]))
    assert os.waitpid(pid, 0)[1] == 0
    assert SharedBarrier(descriptor, RANKS).row(2, 1, 1) == (42,)


@pytest.mark.parametrize("byte", range(0, 80, 8))
def test_half_a_row_is_none(descriptor: int, byte: int) -> None:
    """Its process may die, or be looked at, anywhere between two bytes."""
    shared_barrier = SharedBarrier(descriptor, RANKS)
    shared_barrier.post(0, 0, 2, list(range(1, 1 + MAX_NUMBERS)))
    assert shared_barrier.row(0, 0, 2) is not None
    offset = _ENTRIES_OFFSET + byte
    (found,) = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([found ^ 1]), offset)
    assert shared_barrier.row(0, 0, 2) is None


def test_a_ring_since_the_bell_was_read_is_not_slept_over(descriptor: int) -> None:
    shared_barrier = SharedBarrier(descriptor, RANKS)
    for rank in (0, 1, 1, 2):
        futex_word = shared_barrier.futex_word
        shared_barrier.wake(rank)
        shared_barrier.sleep(futex_word, 1e6)  # returns at once


def test_who_sleeps_is_woken(descriptor: int) -> None:
    shared_barrier = SharedBarrier(descriptor, RANKS)
    futex_word = shared_barrier.futex_word
    sleeper = threading.Thread(target=shared_barrier.sleep, args=(futex_word, 1e6), daemon=True)
    sleeper.start()
    SharedBarrier(descriptor, RANKS).wake(1)
    sleeper.join(DEADLINE_SECONDS)
    assert not sleeper.is_alive()


def test_processes_in_step_see_each_others_rows_in_every_round(descriptor: int) -> None:
    def run(rank: int) -> None:
        shared_barrier = SharedBarrier(descriptor, RANKS)
        for number in range(1, ROUNDS + 1):
            shared_barrier.post(rank, 5, number, [number, rank])
            while True:
                futex_word = shared_barrier.futex_word
                rows = [shared_barrier.row(other, 5, number) for other in range(RANKS)]
                if None not in rows:
                    break
                shared_barrier.sleep(futex_word, 1e6)  # forever, if a ring could be lost
            assert rows == [(number, other) for other in range(RANKS)]

    processes = [in_a_process(lambda rank=rank: run(rank)) for rank in range(RANKS)]  # type: ignore[misc]
    assert [os.waitpid(pid, 0)[1] for pid in processes] == [0] * RANKS


def test_another_file_is_no_board(descriptor: int) -> None:
    with pytest.raises(ValueError, match=f"a shared barrier for {RANKS + 1} ranks has"):
        SharedBarrier(descriptor, RANKS + 1)


def test_it_cannot_be_shrunk_under_a_reader(descriptor: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
