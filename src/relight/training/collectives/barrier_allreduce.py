"""The barrier's own all-reduce: no rank has the sums before every rank has entered.

Between hosts it is gloo's. Ranks that all share memory (see `SharedBarrier`) read each other's numbers there: gloo's
takes ten times as long (benchmarks/step_cost.py). The first one of a generation is always gloo's, and asks who shares:
all ranks see the same answers, so all go the same way. See decisions/0013.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from relight.errors import StepInterrupted
from relight.wire.memory.shared_barrier import MAX_NUMBERS, MAX_RANKS, SharedBarrier

_NOT_SHARED = 0
# Posting and abandoning wake the sleepers at once. On processors that reorder stores a wake-up may come late.
_SLEEP_SECONDS = 0.05

Sums = Callable[[], list[int]]


class BarrierAllReduce:
    """The all-reduce of one group in one generation. For one thread, except `abandon`."""

    def __init__(self, size: int, local: "SharedMemoryAllReduce | None" = None) -> None:
        """`local` is this rank's part of the one through shared memory, if it has any."""
        self._size = size
        self._asked = size > MAX_RANKS
        self._local = None if self._asked else local  # None, too, once it is known that not all share it

    def enter(self, row: Sequence[int], allreduce: Callable[[torch.Tensor], Any]) -> Sums:
        """Enter with `row`, of equal length on all ranks. Returns a function that waits for the others and sums up.

        `allreduce` starts gloo's, of one int64 tensor. The returned function raises StepInterrupted or RuntimeError if
        the generation ends first. That can be after others had the sums.
        """
        if self._asked and self._local is not None and len(row) <= MAX_NUMBERS:
            return self._local.enter(row)
        tokens = [] if self._asked else self._tokens()
        tensor = torch.tensor([*row, *tokens], dtype=torch.int64, device="cpu")
        work = allreduce(tensor)

        def wait() -> list[int]:
            work.wait()
            sums: list[int] = tensor.tolist()
            if tokens:
                self._asked = True
                if len(set(sums[len(row) :])) > 1:
                    self._local = None
            return sums[: len(row)]

        return wait

    def abandon(self) -> None:
        """Have waiting threads raise StepInterrupted: the generation is closed. For any thread."""
        local = self._local
        if local is not None:
            local.abandon()

    def _tokens(self) -> list[int]:
        tokens = [_NOT_SHARED] * self._size
        if self._local is not None:
            tokens[self._local.rank] = self._local.token
        return tokens


class SharedMemoryAllReduce:
    """One rank's part of the all-reduce among all ranks, if they are on one host."""

    def __init__(self, shared_barrier: SharedBarrier, generation: int, rank: int) -> None:
        self.rank = rank
        self.token = shared_barrier.token
        self._shared_barrier = shared_barrier
        self._generation = generation
        self._size = shared_barrier.ranks
        self._entered = 0
        self._abandoned = False

    def enter(self, row: Sequence[int]) -> Sums:
        self._entered += 1
        number = self._entered
        self._shared_barrier.post(self.rank, self._generation, number, row)
        return lambda: self._await_all(number)

    def abandon(self) -> None:
        self._abandoned = True
        self._shared_barrier.wake(self.rank)

    def _await_all(self, number: int) -> list[int]:
        rows: list[tuple[int, ...]] = []
        while True:
            futex_word = self._shared_barrier.futex_word
            while (
                len(rows) < self._size
                and (row := self._shared_barrier.row(len(rows), self._generation, number)) is not None
            ):
                rows.append(row)
            if len(rows) == self._size:
                # Of other lengths only from ranks at other steps, which the sums that they have in common tell.
                return [sum(column) for column in zip(*rows, strict=False)]
            if self._abandoned:
                raise StepInterrupted("the barrier was abandoned: its generation is closed")
            self._shared_barrier.sleep(futex_word, _SLEEP_SECONDS)
