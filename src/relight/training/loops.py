"""The loops of a script that relight protects: over steps, and over epochs of steps."""

import functools
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from relight.errors import UsageError
from relight.script_files import adopt_caller
from relight.training.carried.code.misuse import another_loop
from relight.training.carried.code.source import lines_of
from relight.training.ending import end_with
from relight.training.step import Step
from relight.training.worker.epochs import EpochLoop
from relight.training.worker.inventory import Inventory
from relight.training.worker.loop import StepLoop

_CALLED_AGAIN = (
    "{} {}. Only one loop of steps is protected. For epochs write `for epoch in training.epochs(10)`, and in its body "
    "`for step in training.steps()`; or one loop for all, `for step in training.steps(until=epochs * len(loader))`. "
    "Of several trainings (folds, seeds), start each as a job of its own"
)


class Loops:
    """Offers the steps of a training run; see `Training`."""

    def __init__(self, parts: Inventory, built_at: Sequence[tuple[str, int]]) -> None:
        """`built_at`: the lines of the script that made the run."""
        self._parts = parts
        self._built_at = built_at
        self._loop = StepLoop(parts, functools.partial(end_with, parts.runtime))
        self._epochs: EpochLoop | None = None

    def steps(self, until: int | None = None) -> Iterator[Step]:
        """Offer steps until `until` of them are committed, in total, on every rank.

        Call it once in a process; or, without `until`, once in each turn of a loop over `epochs`. `step.epoch` is the
        epoch of a step. Code above `with step` in the loop's body belongs to the step, and runs again with it. Code
        after the block may evaluate, log and save; guard it with `step.committed`: it also runs after an interrupted
        step.

        Args:
            until: number of committed steps, counted from the start of the job's first run. Default: None, those of the
                epoch that `epochs` has begun.

        Yields:
            `Step` objects, to be used as `with step as batch`.

        Raises:
            UsageError: `until` is less than 1, `steps` was called before in this process, or stands inside a loop.
        """
        if until is None:
            if self._epochs is None:
                raise UsageError("training.steps() outside training.epochs(): say how many, steps(until=10_000)")
            return self._epochs.begin(sys._getframe(1), self._built_at)
        if until < 1:
            raise UsageError(f"steps(until={until}): at least one step")
        called_at = self._begin("training.steps()", sys._getframe(1))
        return self._loop.run(until, called_at)

    def epochs(self, count: int, *, steps_per_epoch: int | None = None) -> Iterator[int]:
        """Offer the numbers of epochs, from 0 to `count - 1`; each turn of the loop has one loop over `steps()`.

        The code between two epochs may evaluate, step schedulers and save, alike on all ranks; it runs once, after the
        last step of an epoch is committed. A process that starts later (a replacement, or a job that goes on from a
        checkpoint) runs the code above the first loop of steps as in epoch 0, and is restored after that: with the
        variables of the script, the number of the epoch among them.

        Args:
            count: number of epochs, counted from the start of the job's first run.
            steps_per_epoch: number of committed steps in each. Default: None, as many as the data has batches, divided
                by `accumulate`.

        Yields:
            The number of the epoch.

        Raises:
            UsageError: `count` or `steps_per_epoch` is less than 1, the data does not say how long an epoch is, a loop
                of steps was begun before in this process, or the call stands inside another loop. In its turns: a turn
                has no loop over `steps()`, more than one, or one that is left early.

        Example::

            for epoch in training.epochs(10):
                for step in training.steps():
                    with step as batch:
                        ...
                evaluate(model)
        """
        if count < 1 or (steps_per_epoch is not None and steps_per_epoch < 1):
            raise UsageError(f"epochs({count}, steps_per_epoch={steps_per_epoch}): at least one step in each")
        length = steps_per_epoch or self._parts.batches.steps_in_an_epoch()
        if not length:
            raise UsageError(
                f"training.epochs({count}): relight does not know how many steps an epoch has. Either the data has no "
                "length, or there are several loaders, or accumulate=K does not divide the number of batches "
                f"(short_groups=True gives an epoch's last step the rest). Say epochs({count}, steps_per_epoch=...)"
            )
        self._begin("training.epochs()", sys._getframe(1))
        self._epochs = EpochLoop(self._parts, self._loop.run, count, length)
        return self._epochs.epochs()

    def _begin(self, what: str, frame: FrameType) -> list[tuple[str, int]]:
        """Begin the only loop of this process, in this frame; return its lines. Raises UsageError for a second one."""
        if self._parts.runtime.has_begun:
            raise UsageError(_CALLED_AGAIN.format(what, "was called a second time in this process"))
        adopt_caller(frame)
        if why := another_loop(frame, self._built_at):
            raise UsageError(_CALLED_AGAIN.format(what, why))
        self._parts.runtime.has_begun = True
        return lines_of(frame)
