"""Finds the first write of a step, whatever makes it, and puts the barrier in front of it.

The first write is `optimizer.step()`, or `scaler.update()` when the scaler skipped the step, or a scheduler or
averaged model that the script moves by itself. Each is caught where it enters; an object that was not handed over
is named to the user, because a replacement would not have it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from relight.errors import UsageError


class WriteWatch:
    """Calls `before_write` in front of every write to tracked state, and `in_use` says whether a step is under way."""

    def __init__(self, tracked: Callable[[Any], bool], before_write: Callable[[], None], in_use: Callable[[], bool]):
        self._tracked = tracked
        self._before_write = before_write
        self._in_use = in_use
        self._undo: list[Callable[[], None]] = []
        self._optimizers_at_work = 0  # one may use another

    def begin_step(self) -> None:
        """A step of the loop begins; one before may have been interrupted anywhere."""
        self._optimizers_at_work = 0

    @property
    def is_optimizer_at_work(self) -> bool:
        """Whether this is inside some `optimizer.step()`, behind its first write."""
        return self._optimizers_at_work > 0

    def install(self) -> None:
        """Hook optimizers globally, and scalers, schedulers and averaged models by their classes."""
        handle = register_optimizer_step_pre_hook(self._before_optimizer)
        self._undo.append(handle.remove)
        self._undo.append(register_optimizer_step_post_hook(self._after_optimizer).remove)
        self._wrap(torch.amp.GradScaler, "update", "scaler")
        self._wrap(AveragedModel, "update_parameters", "ema")

    def remove(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def wrap_scheduler(self, scheduler: LRScheduler) -> None:
        """Catch this kind of scheduler. By its class: an attribute of the instance would land in its state_dict."""
        self._wrap(type(scheduler), "step", None)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if not self._in_use():
            return
        self._require(optimizer, "optimizer")
        self._before_write()
        self._optimizers_at_work += 1

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._optimizers_at_work = max(0, self._optimizers_at_work - 1)

    def _wrap(self, owner: type, method: str, role: str | None) -> None:
        original = getattr(owner, method)
        inherited = method not in vars(owner)
        watch = self

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if watch._in_use() and not _is_disabled(self):
                if role is not None:
                    watch._require(self, role)
                watch._before_write()
            return original(self, *args, **kwargs)

        setattr(owner, method, wrapped)
        self._undo.append(lambda: delattr(owner, method) if inherited else setattr(owner, method, original))

    def _require(self, thing: Any, role: str) -> None:
        if not self._tracked(thing):
            raise UsageError(
                f"this step uses {_named(thing)} that relight.Training does not know: hand it over "
                f"(relight.Training(..., {role}=...)), or a replacement would train on without its state"
            )


def _named(thing: Any) -> str:
    name = type(thing).__qualname__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _is_disabled(thing: Any) -> bool:
    """A scaler of a script that can do without: it changes nothing, and has no state."""
    return isinstance(thing, torch.amp.GradScaler) and not thing.is_enabled()
