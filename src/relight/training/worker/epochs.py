"""A loop of epochs around the loop of steps: one loop for relight, which the script leaves after each epoch.

The loop of steps is left once this process has itself committed the last step of an epoch, and before relight hears of
anything else. So the code between two epochs is code after the block, as far as the protocol is concerned: every rank
that has committed the step runs it before it recovers, and a replacement gets what it left. The code after the last
epoch's steps runs when all ranks have finished, as code after the loop does.
"""

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from types import FrameType

from relight.errors import UsageError
from relight.training.carried.code import source
from relight.training.carried.code.misuse import leaves_epoch, loops_around
from relight.training.step import Step
from relight.training.worker.inventory import Inventory

_BEFORE, _AMONG, _AFTER = range(3)  # where the script is: before, among or after the steps of the epoch under way
_Places = Sequence[tuple[str, int]]
_LEFT = (
    "{}leaves the loop of steps in the middle of an epoch, and training.epochs() would go on with the next one. For "
    "shorter epochs say training.epochs(..., steps_per_epoch=K); to end training, leave the loop of epochs"
)
_ONE_LOOP = (
    "training.steps() {}: each turn of `for epoch in training.epochs(...)` has one loop of steps, "
    "`for step in training.steps()`"
)
_NO_NUMBER = (
    "write `for epoch in training.epochs(...)`, with one variable, in a file (an attribute: `self.epoch = epoch` in "
    "its body): what counts epochs beside it (enumerate, zip) would begin anew in a replacement"
)


class EpochLoop:
    """Made once for a process; see `Training.epochs`."""

    def __init__(
        self, parts: Inventory, run: Callable[[int, _Places], Generator[Step]], count: int, length: int
    ) -> None:
        """`run` begins the loop of steps until so many are committed. `length`: steps in an epoch."""
        self._parts = parts
        self._run = run
        self._length = length
        self._until = count * length
        self._steps: Generator[Step] | None = None  # of all epochs
        self._head: source.Head | None = None
        self._number = 0  # that the loop of epochs was given last
        self._turn = _BEFORE
        self._is_over = False

    def epochs(self) -> Iterator[int]:
        """Offer the numbers of epochs, until all steps are committed."""
        self._show_head(sys._getframe(1))
        try:
            while not self._is_over:
                self._turn = _BEFORE
                self._number = self._parts.runtime.worker.version // self._length
                yield self._number
                if self._turn is _BEFORE:
                    raise UsageError(_ONE_LOOP.format("was not called in an epoch"))
                if self._turn is _AMONG:
                    raise UsageError(_LEFT.format("the script "))
        finally:
            if self._steps is not None:
                self._steps.close()

    def begin(self, frame: FrameType, built_at: _Places) -> Iterator[Step]:
        """Offer the steps of this epoch, in a loop of this frame. Raises UsageError for a loop that leaves it early."""
        if self._turn is not _BEFORE or self._head is None:
            raise UsageError(_ONE_LOOP.format("was called twice in an epoch"))
        if self._steps is None:
            if not source.target_of(self._head):
                raise UsageError(_NO_NUMBER)
            if place := loops_around(frame, built_at, self._head):
                raise UsageError(_ONE_LOOP.format(f"stands inside another loop ({place})"))
            if place := leaves_epoch(frame, self._head):
                raise UsageError(_LEFT.format(f"{place} "))
            self._parts.checkpointing.expect_epochs()
            self._steps = self._run(self._until, source.lines_of(frame))
        self._turn = _AMONG
        self._parts.code_between.end()
        return self._offer(self._steps)

    def _offer(self, steps: Iterator[Step]) -> Iterator[Step]:
        offered, worker = -1, self._parts.runtime.worker  # its `until` is that of the job, also in a late replacement
        for step in steps:
            if step.committed:
                self._tell(sys._getframe(1), step.number // self._length)
                self._end_steps()
                return
            is_again = step.number <= offered  # what its first attempt changed was put back, the number too
            self._tell(sys._getframe(1), step.number // self._length, again=is_again)
            offered = step.number
            yield step
            after = step.number + 1
            if step.committed and after % self._length == 0 and after < worker.until:
                self._end_steps()
                return
        self._turn, self._is_over = _AFTER, True
        if worker.version < worker.until:  # the others have run the code that ends training early
            self._parts.runtime.notices.doubt(
                f"rank {self._parts.runtime.rank} was lost when the script left its loop of epochs: its replacement "
                "ended without running the code after the loop"
            )
            raise SystemExit(0)
        # A process that took a rank after the last step has been in no later epoch than the first.
        self._tell(sys._getframe(1), (worker.until - 1) // self._length)

    def _end_steps(self) -> None:
        """Leave the loop of steps, for the code between two epochs."""
        self._turn = _AFTER
        self._parts.code_between.begin()

    def _tell(self, frame: FrameType, number: int, *, again: bool = False) -> None:
        """Give the loop of epochs around this frame the number of the epoch, if it has another one."""
        if number != self._number or again:
            self._parts.carried.set_epoch(frame, number)
            self._number = number

    def _show_head(self, frame: FrameType) -> None:
        for here in source.user_frames(frame):
            self._head = source.Head(here.f_code, source.position_of(here))
            self._parts.carried.show_epochs(self._head, self._length)
            return


def asking(frame: FrameType) -> FrameType:
    """Return this frame, or the one that has called this module's loops, if it is the frame of one of these."""
    while frame.f_code in (EpochLoop._offer.__code__, EpochLoop.epochs.__code__) and frame.f_back is not None:
        frame = frame.f_back
    return frame
