"""Tells FORWARD from BACKWARD, and lets a stopped rank leave a backward pass early.

Hooks on the modules and on some parameters; the script's loop stays as it is.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from relight.core.fault import Point
from relight.core.position import Phase
from relight.errors import StepInterrupted
from relight.training.progress import Progress
from relight.training.runtime import Runtime
from relight.training.state import TrackedState
from relight.training.torch_private import at_gradient, not_compiled

# Some parameters look, when their gradient is ready, whether the generation was closed: so a backward pass is stopped
# within about so long, whatever its length. Each look costs 10 us once the model has pushed the interpreter out of the
# caches; how many are needed is seen in the first steps.
GATE_SECONDS = 0.02
MOST_GATES = 32
_PASSES_TO_SEE = 3  # the first ones allocate, and take longer


class PhaseHooks:
    """Installed for the duration of the loop."""

    def __init__(self, runtime: Runtime, state: TrackedState, progress: Progress) -> None:
        self._runtime = runtime
        self._state = state
        self._progress = progress
        self._handles: list[Any] = []
        self._gates: list[Any] = []
        self._passes = 0
        self._begun_ns = self._last_gate_ns = 0  # of the last backward pass, while passes are looked at

    def install(self) -> None:
        for module in self._state.modules.values():
            if any(p.requires_grad for p in module.parameters()):
                self._handles.append(module.register_forward_pre_hook(self._on_forward))
                self._handles.append(module.register_forward_hook(self._on_forward_end))
        self._set_gates(self._timed_gate, MOST_GATES)
        gated = self._gated()
        if self._runtime.faults.active and gated:
            self._handles.append(gated[len(gated) // 2].register_post_accumulate_grad_hook(self._strike))

    def remove(self) -> None:
        for handle in (*self._handles, *self._gates):
            handle.remove()
        self._handles.clear()
        self._gates.clear()

    def _gated(self) -> list[torch.Tensor]:
        return [parameter for parameter in self._state.trained_parameters() if parameter.requires_grad]

    def _set_gates(self, gate: Callable[[torch.Tensor], None], most: int) -> None:
        for handle in self._gates:
            handle.remove()
        self._gates = [parameter.register_post_accumulate_grad_hook(gate) for parameter in spread(self._gated(), most)]

    def _active(self) -> bool:
        return self._runtime.in_step and not self._progress.wrote and not self._progress.warming

    @not_compiled
    def _on_forward(self, module: nn.Module, arguments: Any) -> None:  # noqa: ARG002
        if not self._active():
            return
        if self._begun_ns:
            self._look_at_pass()
        if self._runtime.page.phase is not Phase.FORWARD:  # another micro-batch
            self._runtime.page.stamp(Phase.FORWARD)
        self._runtime.faults.strike(Point.FORWARD)

    def _look_at_pass(self) -> None:
        """A backward pass is over, and no other one has begun: once some were seen, as many gates as they need."""
        seconds = max(0, self._last_gate_ns - self._begun_ns) / 1e9
        self._begun_ns = 0
        self._passes += 1
        if self._passes == _PASSES_TO_SEE:
            self._set_gates(self._gate, gates_for(seconds))

    @not_compiled
    def _on_forward_end(self, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002
        if not self._active():
            return
        tensor = _first_differentiable(output)
        if tensor is not None:
            at_gradient(tensor, self._on_backward)

    @not_compiled
    def _on_backward(self, gradient: torch.Tensor) -> None:  # noqa: ARG002
        if self._active() and self._runtime.page.phase is Phase.FORWARD:
            self._runtime.page.stamp(Phase.BACKWARD)
            if self._passes < _PASSES_TO_SEE:
                self._begun_ns = time.monotonic_ns()

    @not_compiled
    def _gate(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        if self._runtime.closed and self._active():
            raise StepInterrupted("the generation was closed by a failure elsewhere")

    @not_compiled
    def _timed_gate(self, parameter: torch.Tensor) -> None:
        self._last_gate_ns = time.monotonic_ns()
        self._gate(parameter)

    @not_compiled
    def _strike(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        if self._active():
            self._runtime.faults.strike(Point.BACKWARD)


def gates_for(seconds: float) -> int:
    """In a backward pass that takes so long."""
    return min(MOST_GATES, max(1, math.ceil(seconds / GATE_SECONDS)))


def spread(parameters: Sequence[torch.Tensor], most: int) -> Sequence[torch.Tensor]:
    """At most so many of them, at equal distances."""
    return parameters[:: max(1, math.ceil(len(parameters) / most))]


def _first_differentiable(output: Any) -> torch.Tensor | None:
    """The first tensor in a module's output that carries gradients; looks into plain objects too."""
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad else None
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                return leaf
        elif getattr(leaf, "__dict__", None):
            found = _first_differentiable(dict(vars(leaf)))
            if found is not None:
                return found
    return None
