"""Gradients that wait for an optimizer step of a later batch: manual optimization that accumulates over batches."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from relight.integrations.trainers.refused import lightning as refused

_MOST_BYTES = 32 * 2**20  # what a rank has for itself is kept in every step, in memory of a fixed size


class WaitingGradients:
    """Gradients that no optimizer step has used yet: state of this rank, with which the next batch goes on.

    They are those of optimizers that pause while others step, too, and those that come after an optimizer's step. What
    an optimizer's script makes None before its next step waits for nothing, and is not kept any more.
    """

    def __init__(self, module: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._module = module
        self._used: set[int] = set()  # parameters, by `id`, that optimizers have updated in the batch under way
        self._stepped = False  # an optimizer, in the batch under way
        self._kept: dict[str, torch.Tensor] = {}  # copies, by parameter; no tensor of these changes
        self._kept_of: set[int] = set()  # parameters, by `id`
        self._put: dict[int, weakref.ref[torch.Tensor]] = {}  # by `id`, gradients with which the batch began
        self._needless: set[int] = set()  # parameters, by `id`, whose gradients are made None before they are used
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._after_backward)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_given: Any) -> None:
        held = _held(optimizer)
        found = [(number, self._put.pop(number), one) for number, one in held.items() if number in self._put]
        if found and all(one.grad is None or was() is not one.grad for _, was, one in found):
            self._needless |= held.keys()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_given: Any) -> None:
        self._used |= _held(optimizer).keys()
        self._stepped = True

    def _after_backward(self, parameter: torch.Tensor) -> None:
        self._used.discard(id(parameter))

    def begin(self) -> None:
        """Begin a step of relight with the gradients that wait: a recovery has thrown them away on all ranks."""
        self._put = {}
        for name, parameter in self._module.named_parameters() if self._kept else ():
            if name in self._kept:
                parameter.grad = torch.empty_like(parameter).copy_(self._kept[name])  # as the parameter lies in memory
                self._put[id(parameter)] = weakref.ref(parameter.grad)
        self._kept = {}

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Inside is a batch. Raises UsageError if more gradients wait after it than can be kept for a replacement."""
        self._used, self._stepped = set(), False
        yield
        found: dict[str, torch.Tensor] = {}
        self._kept_of = set()
        for name, parameter in self._module.named_parameters():
            number, gradient = id(parameter), parameter.grad
            if gradient is None or number in self._used or number in self._needless:
                continue
            found[name] = gradient.detach()
            self._kept_of.add(number)
        if (size := sum(gradient.nbytes for gradient in found.values())) > _MOST_BYTES:
            if not self._stepped and any(bool(gradient.count_nonzero()) for gradient in found.values()):
                how = f"gradients of {size / 2**20:.0f} MiB wait after a training_step without an optimizer step"
                raise refused.ACCUMULATED.error(refused.BY, how)
            found, self._kept_of = {}, set()  # most scripts make them zero before they are used: else the report tells
        self._kept = {name: gradient.clone() for name, gradient in found.items()}

    def kept_gradients(self) -> set[int]:
        """Return, by `id`, the parameters of which gradients are kept: relight asks which a recovery would lose."""
        return self._kept_of

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the gradients to which the next batch adds its own."""
        return self._kept

    def load_state_dict(self, saved: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` returned; the next batch begins with it."""
        self._kept = {name: gradient.clone() for name, gradient in saved.items()}


def _held(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    return {id(one): one for group in optimizer.param_groups for one in group["params"]}
