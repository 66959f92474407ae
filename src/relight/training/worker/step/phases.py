"""Tells FORWARD from BACKWARD, and lets a stopped rank leave a backward pass early.

Hooks on the modules and on some parameters; the script's loop stays as it is.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from relight.core.protocol.fault import Point
from relight.core.protocol.position import Phase
from relight.errors import StepInterrupted
from relight.training.process.runtime import Runtime
from relight.training.state.tracked import TrackedState
from relight.training.torch_private.autograd import (
    at_backward,
    gradient_hooks,
    is_compiled_transform,
    only_inlined,
    put_hook,
)
from relight.training.torch_private.script_modes import unseen

# Some parameters look, when their gradient is ready, whether the generation was closed: so a backward pass is stopped
# within about so long, whatever its length. How many are needed is seen in the first steps.
GATE_SECONDS = 0.02
FEWEST_GATES, MOST_GATES = 4, 32
_PASSES_TO_SEE = 3  # the first ones allocate, and take longer


_installed: list["PhaseHooks"] = []


@only_inlined
def before_forward(module: nn.Module, arguments: Any) -> None:  # noqa: ARG001
    """A function, since a step may copy a module with its hooks: a method would be copied with all that it holds."""
    if not is_compiled_transform():
        _tell_forward()


@unseen
def _tell_forward() -> None:
    for hooks in _installed:
        hooks.on_forward()


class PhaseHooks:
    """Installed for the duration of the loop."""

    def __init__(self, runtime: Runtime, state: TrackedState) -> None:
        self._runtime = runtime
        self._state = state
        self._worker = runtime.worker
        self._undo: list[Callable[[], None]] = []
        self._gates = BackwardHooks(self._look)
        self._gate_count = FEWEST_GATES
        self._passes = 0  # of those that are looked at
        self._worked_ns = 0  # in backward passes, up to the last one of these
        runtime.orders.at_close.append(self._gates.shut)

    def install(self) -> None:
        for module in self._state.modules.values():
            if self._trains(module):
                self._undo.append(module.register_forward_pre_hook(before_forward).remove)
        _installed.append(self)
        self._undo.append(at_backward(self._on_backward))
        self._gates.place(self._gated())
        trained = [parameter for parameter in self._state.members.trained() if parameter.requires_grad]
        if self._runtime.faults.active and trained:
            self._undo.append(trained[len(trained) // 2].register_post_accumulate_grad_hook(self._strike).remove)

    def remove(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self in _installed:
            _installed.remove(self)
        self._gates.open()

    def open_gates(self) -> None:
        """A recovery is over."""
        self._gates.open()
        self._shut_if_closed()

    def _shut_if_closed(self) -> None:
        """Another thread shuts the gates when the generation is closed: perhaps those that were here before."""
        if self._runtime.closed:
            self._gates.shut()

    def _trains(self, module: nn.Module) -> bool:
        """Return whether it has parameters that change: now, or once the script unfreezes them."""
        trained = {id(parameter) for parameter in self._state.members.trained()}
        return any(p.requires_grad or id(p) in trained for p in module.parameters())

    def _gated(self) -> list[torch.Tensor]:
        """Some parameters that are trained now, and some that are frozen, perhaps for a moment."""
        trained = self._state.members.trained()
        now = [parameter for parameter in trained if parameter.requires_grad]
        frozen = [parameter for parameter in trained if not parameter.requires_grad]
        return [*spread(now, self._gate_count), *spread(frozen, self._gate_count)]

    def _active(self) -> bool:
        return self._runtime.protection.in_step and not (self._worker.passed or self._runtime.is_rehearsing)

    def on_forward(self) -> None:
        """A module that was handed over, or a copy of one, is called."""
        if not self._active():
            return
        if self._passes == _PASSES_TO_SEE:
            self._passes += 1
            self._place_gates(self._runtime.page.worked_ns(Phase.BACKWARD) - self._worked_ns)
        if self._runtime.page.phase is not Phase.FORWARD:  # another micro-batch
            self._runtime.page.stamp(Phase.FORWARD)
        self._runtime.faults.strike(Point.FORWARD)

    def _place_gates(self, pass_ns: int) -> None:
        """As many as a backward pass needs in which this rank works for so long."""
        self._gate_count = gates_for(pass_ns / 1e9)
        if self._gate_count > FEWEST_GATES:
            self._gates.place(self._gated())
            self._shut_if_closed()

    @unseen
    def _on_backward(self) -> None:
        page = self._runtime.page
        if page.phase is Phase.FORWARD and self._active():
            page.stamp(Phase.BACKWARD)
            self._state.gradients.see_backward()
            if self._passes < _PASSES_TO_SEE:
                self._passes += 1
                self._worked_ns = page.worked_ns(Phase.BACKWARD)

    @unseen
    def _look(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        if self._runtime.closed and self._active():
            raise StepInterrupted("the generation was closed by a failure elsewhere")

    @unseen
    def _strike(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        if self._active():
            self._runtime.faults.strike(Point.BACKWARD)


class BackwardHooks:
    """Hooks on some parameters, in place only while they are shut: an open one costs next to nothing.

    A hook costs 10 us once the model has pushed the interpreter out of the caches. What C++ looks at, a parameter's
    list of hooks, is made before, forever: then any thread may put a hook in, also while a backward pass runs. And
    also into that of a parameter that is frozen: torch would refuse it, although the script may unfreeze it any moment.
    """

    def __init__(self, look: Callable[[torch.Tensor], None]) -> None:
        """`look` is called with each of those parameters whose gradient is ready, if the gates are shut."""
        self._look = look
        self._lock = threading.Lock()
        self._parameters: Sequence[torch.Tensor] = ()
        self._handles: list[Any] = []

    def place(self, parameters: Sequence[torch.Tensor]) -> None:
        """At these from now on, and open."""
        for parameter in parameters:
            gradient_hooks(parameter)
        with self._lock:  # a thread that shuts them finds the old ones, which are opened here, or the new ones
            self._remove()
            self._parameters = parameters

    def shut(self) -> None:
        """For any thread."""
        with self._lock:
            if not self._handles:
                self._handles = [put_hook(parameter, self._look) for parameter in self._parameters]

    def open(self) -> None:
        with self._lock:
            self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def gates_for(seconds: float) -> int:
    """The number of gates in a backward pass that takes so long."""
    return min(MOST_GATES, max(FEWEST_GATES, math.ceil(seconds / GATE_SECONDS)))


def spread(parameters: Sequence[torch.Tensor], most: int) -> Sequence[torch.Tensor]:
    """At most so many of them, at equal distances."""
    return parameters[:: max(1, math.ceil(len(parameters) / most))]
