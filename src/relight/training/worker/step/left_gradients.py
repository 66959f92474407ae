"""Gradients that wait over several steps: while an optimizer pauses and others step, and nothing makes them zero.

A recovery throws all gradients away, so an optimizer that uses such ones later computes something else.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from relight.training.state.optimizers.parameter_groups import parameters_of
from relight.training.state.tracked import have_gradients
from relight.training.torch_private.script_modes import sees_calls, unseen


class LeftGradients:
    """Knows of which optimizers gradients wait, and since when."""

    def __init__(
        self,
        optimizers: Mapping[str, Any],
        generation: Callable[[], int],
        doubt: Callable[[str], None],
        seen_by_mode: Callable[[], None],
    ) -> None:
        """Watch optimizers by their names.

        `generation` is another one after each recovery; `seen_by_mode` is called when a mode of the script sees how
        gradients are made zero.
        """
        self._optimizers, self._generation, self._doubt = optimizers, generation, doubt
        self._seen_by_mode = seen_by_mode
        self._waiting: dict[str, int] = {}  # with the generation in which the first of these were computed
        self._at_start = dict(self._waiting)
        self._stepped: set[str] = set()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Notice when a script makes gradients zero."""
        for owner in (Optimizer, nn.Module):
            self._wrap(owner)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def begin_attempt(self) -> None:
        """A step begins, perhaps again."""
        self._waiting = dict(self._at_start)
        self._stepped.clear()

    def before_optimizer(self, name: str) -> None:
        """An optimizer is about to use its gradients."""
        self._stepped.add(name)
        if self._waiting.pop(name, self._generation()) != self._generation():
            self._doubt(
                f"{name} used gradients of steps in which it did not step itself, and a recovery threw those away. "
                "Make gradients zero at the beginning of each step, also those of an optimizer that pauses"
            )

    def end_step(self) -> None:
        """The step counts."""
        for name, optimizer in self._optimizers.items() if self._stepped else ():
            if name not in self._stepped and name not in self._waiting and have_gradients(parameters_of(optimizer)):
                self._waiting[name] = self._generation()
        self._at_start = dict(self._waiting)

    @unseen
    def _made_zero(self, owner: Any) -> None:
        if not self._waiting:
            return
        if isinstance(owner, nn.Module):
            owned = {id(parameter) for parameter in owner.parameters()}
        else:
            owned = {id(parameter) for parameter in parameters_of(owner)}
        for name in list(self._waiting):
            if any(id(parameter) in owned for parameter in parameters_of(self._optimizers[name])):
                del self._waiting[name]

    def _wrap(self, owner: Any) -> None:
        original = owner.zero_grad
        left = self

        @functools.wraps(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            if sees_calls():
                left._seen_by_mode()
            left._made_zero(self)
            return original(self, *args, **kwargs)

        def undo() -> None:
            owner.zero_grad = original

        owner.zero_grad = zero_grad
        self._undo.append(undo)
