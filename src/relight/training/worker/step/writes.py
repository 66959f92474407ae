"""Finds the writes of a step, whatever makes them, and says so before they happen.

A write is `optimizer.step()`, `scaler.update()`, or what moves a scheduler. Each is caught where it enters; an object
that was not handed over is named to the user, because a replacement would not have it. What moves an averaged model is
caught too, and is no write: it may come anywhere in a step.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from relight.errors import UsageError
from relight.training.torch_private.script_modes import unseen
from relight.training.worker.step.left_gradients import LeftGradients
from relight.training.wrappers import is_container

_OUTSIDE = "{kind}.{method}() of {name} is called outside `with step`: move it into the block, where its gradients are"


class WriteWatch:
    """Calls `before_write` in front of every write to tracked state, and `before_average` before an average moves."""

    def __init__(
        self,
        name_of: Callable[[Any], str | None],
        is_replicated: Callable[[Any], bool],
        before_write: Callable[[str, str | None], None],
        before_average: Callable[[AveragedModel], None],
        in_use: Callable[[], bool],
        left: LeftGradients,
    ) -> None:
        """Watch for writes.

        Args:
            name_of: under which name an object was handed over; None: it was not.
            is_replicated: whether an optimizer is one that all ranks share, and not in `per_rank`.
            before_write: see `Barrier`.
            before_average: see `Transaction`.
            in_use: whether a step is under way.
            left: knows of gradients that wait for an optimizer.
        """
        self._name_of = name_of
        self._is_replicated = is_replicated
        self._before_write = before_write
        self._before_average = before_average
        self._in_use = in_use
        self._left = left
        self._undo: list[Callable[[], None]] = []
        self._made: set[int] = set()  # optimizers made in the step under way, or since the last one
        self.new_schedulers: weakref.WeakSet[LRScheduler] = weakref.WeakSet()  # that steps have made
        self._optimizers_at_work = 0  # one may use another

    def begin_step(self) -> None:
        """A step of the loop begins; one before may have been interrupted anywhere."""
        self._optimizers_at_work = 0
        self._made.clear()
        self._left.begin_attempt()

    def end_step(self) -> None:
        """The step counts."""
        self._left.end_step()

    @property
    def is_optimizer_at_work(self) -> bool:
        """True if this is inside some `optimizer.step()`, after its first write."""
        return self._optimizers_at_work > 0

    def install(self) -> None:
        """Hook optimizers globally, and scalers, schedulers and averaged models by their classes."""
        handle = register_optimizer_step_pre_hook(self._before_optimizer)
        self._undo.append(handle.remove)
        self._left.install()
        self._undo.append(self._left.remove)
        self._undo.append(register_optimizer_step_post_hook(self._after_optimizer).remove)
        # One that a step, or code between steps, makes, uses and throws away (a probe, an inner loop) is no state.
        self._note_new(Optimizer, lambda optimizer: self._made.add(id(optimizer)))
        for kind in (LRScheduler, ReduceLROnPlateau):
            self._note_new(kind, self._note_scheduler)
        self._wrap(torch.amp.GradScaler, "update", "scaler")
        self._wrap(AveragedModel, "update_parameters", "ema")

    def remove(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def wrap_scheduler(self, scheduler: LRScheduler) -> None:
        """Catch this kind of scheduler. By its class: an attribute of the instance would land in its state_dict."""
        self._wrap(type(scheduler), "step", None)

    def _note_new(self, kind: Any, note: Callable[[Any], None]) -> None:
        """Call `note` with each object of this class that is made from now on."""
        original = kind.__init__

        @functools.wraps(original)
        def __init__(thing: Any, *args: Any, **kwargs: Any) -> None:
            original(thing, *args, **kwargs)
            note(thing)

        kind.__init__ = __init__
        self._undo.append(lambda: setattr(kind, "__init__", original))

    def _note_scheduler(self, scheduler: LRScheduler) -> None:
        if self._in_use():
            self.new_schedulers.add(scheduler)

    @unseen
    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        name = self._name_of(optimizer)
        if name is None and is_container(optimizer):
            return  # those in it come one by one
        if name is None and id(optimizer) not in self._made:
            raise _unknown(optimizer, "optimizer")
        if not self._in_use():
            self._refuse_outside(optimizer, "step")
            return
        if name is not None:
            self._left.before_optimizer(name)
            self._before_write(name, name if self._is_replicated(optimizer) else None)
        self._optimizers_at_work += 1

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._optimizers_at_work = max(0, self._optimizers_at_work - 1)

    def _refuse_outside(self, thing: Any, method: str) -> None:
        name = self._name_of(thing)
        if name is not None and not _is_disabled(thing):
            raise UsageError(_OUTSIDE.format(kind=type(thing).__qualname__, method=method, name=name))

    def _wrap(self, owner: type, method: str, role: str | None) -> None:
        original = getattr(owner, method)
        inherited = method not in vars(owner)
        watch = self

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not watch._in_use():  # an average or a scheduler has no part in the barrier there
                if role == "scaler":
                    watch._refuse_outside(self, method)
            elif not _is_disabled(self):
                if role is not None and watch._name_of(self) is None:
                    raise _unknown(self, role)
                if isinstance(self, AveragedModel):
                    watch._before_average(self)
                else:
                    watch._before_write(watch._name_of(self) or method, None)
            return original(self, *args, **kwargs)

        setattr(owner, method, wrapped)
        self._undo.append(lambda: delattr(owner, method) if inherited else setattr(owner, method, original))


def _unknown(thing: Any, role: str) -> UsageError:
    instead = ""
    if role == "optimizer":
        instead = (
            ". One that is made in the middle of training comes too late for that: change the param_groups of the "
        )
        instead += "one that was handed over (add_param_group), inside the block, or hand over both before the loop"
    return UsageError(
        f"a step, or code between steps, uses {_named(thing)} that relight.Training does not know: hand it over "
        f"(relight.Training(..., {role}=...)), or a replacement would train on without its state{instead}"
    )


def _named(thing: Any) -> str:
    name = type(thing).__qualname__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _is_disabled(thing: Any) -> bool:
    """A scaler of a script that can do without: it changes nothing, and has no state."""
    return isinstance(thing, torch.amp.GradScaler) and not thing.is_enabled()
