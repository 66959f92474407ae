"""One step on offer: the unit that is committed or repeated."""

from types import TracebackType
from typing import Any, Protocol

import torch


class Loop(Protocol):
    """The loop that offers a step, as the step calls it."""

    def enter_step(self, step: "Step") -> Any: ...

    def exit_step(self, step: "Step", error: BaseException | None) -> bool: ...

    def epoch_of(self, step: int) -> int: ...

    def report(self, loss: torch.Tensor | float | None, values: dict[str, torch.Tensor | float]) -> None: ...


class Step:
    """One step of the loop, as `Training.steps` yields it: use it once, as `with step as batch`.

    The block draws the step's batch as it begins. Its end commits the step. A failure on another rank is absorbed by
    the block: the step is not committed then, and the loop offers it again.

    Attributes:
        number: number of the step in the job, from 0.
        attempt: how often this step was started before.
        warmup: True for a standby's rehearsal, of which nothing is kept.
        committed: True once the step counts; False if a failure interrupted it, and in a rehearsal.
        entered: True once the block was entered.
    """

    def __init__(self, loop: Loop, number: int, attempt: int, *, warmup: bool = False) -> None:
        self._loop = loop
        self.number = number
        self.attempt = attempt
        self.warmup = warmup
        self.committed = False
        self.entered = False

    @classmethod
    def committed_before(cls, loop: Loop, number: int, attempt: int) -> "Step":
        """Make the step that another process of this rank has committed, and that the script keeps."""
        step = cls(loop, number, attempt)
        step.committed = step.entered = True
        return step

    @property
    def epoch(self) -> int:
        """Epoch of this step's batch, from 0."""
        return self._loop.epoch_of(self.number)

    def report(self, loss: torch.Tensor | float | None = None, **values: torch.Tensor | float) -> None:
        """Report values of this step: `loss` for the progress line, and all of them for `Training.log_to`.

        Call it inside the block and before `optimizer.step()`: then the values are logged even if rank 0 dies after the
        barrier. Values that an interrupted attempt of a step reported are dropped.

        Args:
            loss: a number, or a tensor with one element. A tensor on a device is read at the barrier, where that costs
                no wait, and is not shown in the progress line. Default: None.
            values: more numbers or tensors with one element, by name. `step` and `time` are taken.

        Raises:
            UsageError: a value is no number, or its name is taken.

        Example::

            step.report(loss, accuracy=correct / total)
        """
        self._loop.report(loss, values)

    def __enter__(self) -> Any:
        self.entered = True
        return self._loop.enter_step(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._loop.exit_step(self, error)
