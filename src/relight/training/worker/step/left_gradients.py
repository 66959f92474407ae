"""Gradients that wait over several steps: while an optimizer pauses and others step, and nothing makes them zero.

Those of a parameter that no optimizer holds wait as well, until one does (layers that thaw late, without having been
frozen), or until the norm of all gradients is taken. A recovery throws all gradients away, so what uses such ones later
computes something else.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from relight.training.state.modules.slots import Key
from relight.training.state.optimizers.gradients import Gradients, have_gradients
from relight.training.state.optimizers.parameter_groups import parameters_of
from relight.training.torch_private.script_modes import sees_calls, unseen
from relight.words import listed

_READS = r"\.grad\b|\bclip_grad|\bget_total_norm\b|\bgrad_norm"
_LOST = (
    "{names}: no optimizer held them, so that their gradients added up from step to step, and a recovery threw those "
    "away{at}. Freeze them as long as none does (requires_grad_(False)), or make all gradients zero in each step "
    "(model.zero_grad())"
)


class LeftGradients:
    """Knows of which optimizers gradients wait, and since when."""

    def __init__(
        self,
        optimizers: Mapping[str, Any],
        generation: Callable[[], int],
        doubt: Callable[[str], None],
        gradients: Gradients,
        mentioned: Callable[[str], str],
    ) -> None:
        """Watch optimizers by their names.

        `generation` is another one after each recovery; `mentioned` returns the first line of the script that a pattern
        matches.
        """
        self._optimizers, self._generation, self._doubt = optimizers, generation, doubt
        self._gradients, self._mentioned = gradients, mentioned
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
        if lost := self._gradients.lost:
            self._doubt_lost([lost[id(one)] for one in parameters_of(self._optimizers[name]) if id(one) in lost])
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
        self._gradients.commit()
        if self._gradients.lost and self._reader:
            self._doubt_lost([*self._gradients.lost.values()], f", before {self._reader} could read them")

    @functools.cached_property
    def _reader(self) -> str:
        """The line of the script that may read gradients of all parameters; empty: there is none."""
        return self._mentioned(_READS)

    def _doubt_lost(self, keys: list[Key], at: str = "") -> None:
        """Tell, once after a recovery, that gradients of these parameters were lost, and are used."""
        if keys:
            self._doubt(_LOST.format(names=listed([name for _, name in keys]), at=at))
            self._gradients.lost.clear()

    @unseen
    def _made_zero(self, owner: Any) -> None:
        lost = self._gradients.lost
        if not self._waiting and not lost:
            return
        if isinstance(owner, nn.Module):
            owned = {id(parameter) for parameter in owner.parameters()}
        else:
            owned = {id(parameter) for parameter in parameters_of(owner)}
        for number in owned & lost.keys():
            del lost[number]
        for name in list(self._waiting):
            if any(id(parameter) in owned for parameter in parameters_of(self._optimizers[name])):
                del self._waiting[name]

    def _wrap(self, owner: Any) -> None:
        original = owner.zero_grad
        left = self

        @functools.wraps(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            if sees_calls():
                left._gradients.note_each()
            left._made_zero(self)
            return original(self, *args, **kwargs)

        def undo() -> None:
            owner.zero_grad = original

        owner.zero_grad = zero_grad
        self._undo.append(undo)
