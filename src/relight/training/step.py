"""One step on offer: the unit that is committed or repeated."""

from types import TracebackType
from typing import Any, Protocol

import torch


class Loop(Protocol):
    """What a step asks of the loop that offers it."""

    def enter_step(self, step: "Step") -> Any: ...

    def exit_step(self, step: "Step", error: BaseException | None) -> bool: ...

    def epoch_of(self, step: int) -> int: ...

    def report_loss(self, loss: torch.Tensor | float) -> None: ...


class Step:
    """Use it once, as `with step as batch`.

    `number` counts from 0. `committed` says afterwards whether the step counts: False if a failure elsewhere
    interrupted it (it is offered again), and in a standby's warm-up.
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
        """The epoch that this step's batch lies in."""
        return self._loop.epoch_of(self.number)

    def report(self, loss: torch.Tensor | float) -> None:
        """Show `loss` in the progress line. A tensor is read only if that costs no wait (host memory)."""
        self._loop.report_loss(loss)

    def __enter__(self) -> Any:
        self.entered = True
        return self._loop.enter_step(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._loop.exit_step(self, error)
