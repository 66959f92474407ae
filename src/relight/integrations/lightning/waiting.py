"""Gradients that wait for an optimizer step of a later batch: manual optimization that accumulates over batches."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from relight.integrations.trainers.refused import lightning as refused

_MOST_BYTES = 32 * 2**20  # what a rank has for itself is kept in every step, in memory of a fixed size


class WaitingGradients:
    """Gradients of batches since the last optimizer step: state of this rank, with which the next batch goes on."""

    keeps_gradients = True  # relight asks: a recovery loses none while no optimizer steps

    def __init__(self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._module = module
        self._stepped = False  # an optimizer, in the batch under way
        self._kept: dict[str, torch.Tensor] = {}  # copies, by parameter; no tensor of these changes
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._see_step)

    def _see_step(self, *_given: Any) -> None:
        self._stepped = True

    def begin(self) -> None:
        """Begin a step of relight with the gradients that wait: a recovery has thrown them away on all ranks."""
        for name, parameter in self._module.named_parameters() if self._kept else ():
            if name in self._kept:
                parameter.grad = torch.empty_like(parameter).copy_(self._kept[name])  # as the parameter lies in memory
        self._kept = {}

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Inside is a batch. Raises UsageError if more gradients wait after it than can be kept for a replacement."""
        self._stepped = False
        yield
        named = self._module.named_parameters() if not self._stepped else ()
        found = {name: parameter.grad.detach() for name, parameter in named if parameter.grad is not None}
        if (size := sum(gradient.nbytes for gradient in found.values())) <= _MOST_BYTES:
            self._kept = {name: gradient.clone() for name, gradient in found.items()}
        elif any(bool(gradient.count_nonzero()) for gradient in found.values()):
            how = f"gradients of {size / 2**20:.0f} MiB wait after a training_step without an optimizer step"
            raise refused.ACCUMULATED.error(refused.BY, how)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the gradients to which the next batch adds its own."""
        return self._kept

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned; the next batch begins with it."""
        self._kept = {name: gradient.clone() for name, gradient in saved.items()}
