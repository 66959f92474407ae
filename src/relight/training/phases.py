"""Tells FORWARD from BACKWARD, and lets a stopped rank leave a backward pass early.

Hooks on the modules and on some parameters; the script's loop stays as it is.
"""

from typing import Any

import torch
from torch import nn

from relight.core.fault import Point
from relight.core.position import Phase
from relight.errors import StepInterrupted
from relight.training.progress import Progress
from relight.training.runtime import Runtime
from relight.training.state import TrackedState
from relight.training.torch_private import not_compiled

# How many parameters look, when their gradient is ready, whether the generation was closed: a backward pass stops
# within a fraction of its length. Each look costs 10 us once the model has pushed the interpreter out of the caches.
BACKWARD_GATES = 12


class PhaseHooks:
    """Installed for the duration of the loop."""

    def __init__(self, runtime: Runtime, state: TrackedState, progress: Progress) -> None:
        self._runtime = runtime
        self._state = state
        self._progress = progress
        self._handles: list[Any] = []

    def install(self) -> None:
        for module in self._state.modules.values():
            if any(p.requires_grad for p in module.parameters()):
                self._handles.append(module.register_forward_pre_hook(self._on_forward))
                self._handles.append(module.register_forward_hook(self._on_forward_end))
        gated = [p for p in self._state.trained_parameters() if p.requires_grad]
        chosen = gated[:: max(1, len(gated) // BACKWARD_GATES)]
        for index, parameter in enumerate(chosen):
            gate = self._gate_with_fault if index == len(chosen) // 2 else self._gate
            self._handles.append(parameter.register_post_accumulate_grad_hook(gate))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _active(self) -> bool:
        return self._runtime.in_step and not self._progress.wrote and not self._progress.warming

    @not_compiled
    def _on_forward(self, module: nn.Module, arguments: Any) -> None:  # noqa: ARG002
        if not self._active():
            return
        if self._runtime.page.phase is not Phase.FORWARD:  # another micro-batch
            self._runtime.page.stamp(Phase.FORWARD)
        self._runtime.faults.strike(Point.FORWARD)

    @not_compiled
    def _on_forward_end(self, module: nn.Module, arguments: Any, output: Any) -> None:  # noqa: ARG002
        if not self._active():
            return
        tensor = _first_differentiable(output)
        if tensor is not None:
            tensor.register_hook(self._on_backward)

    @not_compiled
    def _on_backward(self, gradient: torch.Tensor) -> None:  # noqa: ARG002
        if self._active() and self._runtime.page.phase is Phase.FORWARD:
            self._runtime.page.stamp(Phase.BACKWARD)

    @not_compiled
    def _gate(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        if self._runtime.closed and self._active():
            raise StepInterrupted("the generation was closed by a failure elsewhere")

    @not_compiled
    def _gate_with_fault(self, parameter: torch.Tensor) -> None:
        self._gate(parameter)
        if self._active():
            self._runtime.faults.strike(Point.BACKWARD)


def _first_differentiable(output: Any) -> torch.Tensor | None:
    """The first tensor in a module's output that carries gradients; looks into plain objects too."""
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                return leaf
        elif getattr(leaf, "__dict__", None):
            found = _first_differentiable(dict(vars(leaf)))
            if found is not None:
                return found
    return None
