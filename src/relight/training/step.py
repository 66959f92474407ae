"""One step on offer: the unit that is committed or repeated."""

from types import TracebackType
from typing import Any, Protocol

import torch


class Loop(Protocol):
    """The part of the loop that a step calls."""

    def enter_step(self, step: "Step") -> Any: ...

    def exit_step(self, step: "Step", error: BaseException | None) -> bool: ...

    def epoch_of(self, step: int) -> int: ...

    def report(self, loss: torch.Tensor | float | None, values: dict[str, torch.Tensor | float]) -> None: ...


class Step:
    """Use it once, as `with step as batch`.

    `number` counts from 0. `committed` says afterwards whether the step counts: False if a failure elsewhere
    interrupted it (the loop offers it again), and in a standby's warm-up.
    """

    def __init__(self, loop: Loop, number: int, attempt: int, *, warmup: bool = False) -> None:
        self._loop = loop
        self.number = number
        self.attempt = attempt  # how often this step was started before
        self.warmup = warmup  # a standby's rehearsal; nothing of it is kept
        self.committed = False
        self.entered = False

    @property
    def epoch(self) -> int:
        """The epoch of this step's batch."""
        return self._loop.epoch_of(self.number)

    def report(self, loss: torch.Tensor | float | None = None, **values: torch.Tensor | float) -> None:
        """Show `loss` in the progress line, and give it and other values to the loggers of `Training.log_to`.

        Tensors have one element; one on a device is read at the barrier, where it costs no wait, and is not shown in
        the progress line. Report inside the block and before `optimizer.step()`: then a step's values are logged even
        if rank 0 dies after the barrier. The values of an interrupted attempt are dropped.

        Raises UsageError for a value that is no number.
        """
        self._loop.report(loss, values)

    def __enter__(self) -> Any:
        self.entered = True
        return self._loop.enter_step(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._loop.exit_step(self, error)
