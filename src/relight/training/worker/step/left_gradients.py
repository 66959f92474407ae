"""Gradients that wait over several steps: while an optimizer pauses and others step, and nothing makes them zero.

Those of an optimizer that steps each time wait as well, if the script makes them zero before the last backward pass
through its parameters (of a discriminator, before the generator's), or never: the next step adds to them.

Those of a parameter that no optimizer holds wait as well, until one does (layers that thaw late, without having been
frozen), or until the norm of all gradients is taken. A recovery throws all gradients away, and a checkpoint has none,
so what uses such ones later computes something else.
"""

import functools
import weakref
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
_USED = (
    "{name} used gradients of earlier steps, and these were lost: a recovery throws them away, and a checkpoint has "
    "none. Make gradients zero at the beginning of each step, also those of an optimizer that pauses"
)


class LeftGradients:
    """Knows of which optimizers gradients wait, and which of those were lost."""

    def __init__(
        self,
        optimizers: Mapping[str, Any],
        doubt: Callable[[str], None],
        gradients: Gradients,
        mentioned: Callable[[str], str],
    ) -> None:
        """Watch optimizers by their names. `mentioned` returns the first line of the script that a pattern matches."""
        self._optimizers, self._doubt = optimizers, doubt
        self._gradients, self._mentioned = gradients, mentioned
        self._zeroed: set[int] = set()  # by `id`, parameters whose gradients wait no longer, if the step counts
        self._owners: list[weakref.ref[Any]] = []  # whose gradients the step under way has made zero so far
        self._stepped: set[str] = set()
        self._adding: set[str] = set()  # optimizers whose script adds to gradients of earlier steps
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
        self._zeroed.clear()
        self._owners.clear()
        self._stepped.clear()

    def before_optimizer(self, name: str) -> None:
        """An optimizer is about to use its gradients."""
        if name not in self._stepped and name in self._optimizers:
            self._see_whether_added(name)
        self._stepped.add(name)
        lost = self._gradients.lost
        if not lost or name not in self._optimizers:  # one in `per_rank` is on its own
            return
        used = {id(one): lost[id(one)] for one in parameters_of(self._optimizers[name]) if id(one) in lost}
        self._doubt_lost([key for number, key in used.items() if not self._gradients.has_updated(number)])
        for number in used.keys() & lost.keys():
            del lost[number]
        if any(map(self._gradients.has_updated, used)):
            self._doubt(_USED.format(name=name))

    def end_step(self) -> None:
        """The step counts."""
        waiting = self._gradients.waiting
        for number in self._zeroed & waiting.keys():
            del waiting[number]
        kept = self._gradients.kept()
        for name, optimizer in self._optimizers.items():
            is_adding = name in self._adding
            if name in self._stepped and not (waiting or is_adding):
                continue
            held = [one for one in parameters_of(optimizer) if id(one) not in kept]
            if name in self._stepped:
                for one in held:
                    waiting.pop(id(one), None)
                if is_adding and have_gradients(held):
                    waiting |= self._gradients.named(held)
            elif have_gradients(fresh := [one for one in held if id(one) not in waiting]):
                waiting |= self._gradients.named(fresh)
        self._gradients.commit()
        others = [key for number, key in self._gradients.lost.items() if not self._gradients.has_updated(number)]
        if others and self._reader:
            self._doubt_lost(others, f", before {self._reader} could read them")

    def _see_whether_added(self, name: str) -> None:
        """See, as an optimizer is about to step, whether the step has added to gradients that earlier ones left."""
        gradients, held = self._gradients, parameters_of(self._optimizers[name])
        added = gradients.added_to(held)
        if added is None:
            return
        added -= gradients.waiting.keys()
        if added and self._owners:
            added -= {id(one) for owner in self._owners for one in _parameters_of(owner())}
        if added := {number for number in added if gradients.has_updated(number)}:
            self._adding.add(name)
            gradients.waiting |= gradients.named(one for one in held if id(one) in added)
            if added & gradients.thrown:  # before that was known
                self._doubt(_USED.format(name=name))
        gradients.thrown.difference_update(map(id, held))

    @functools.cached_property
    def _reader(self) -> str:
        """The line of the script that may read gradients of all parameters; empty: there is none."""
        return self._mentioned(_READS)

    def _doubt_lost(self, keys: list[Key], at: str = "") -> None:
        """Tell, once after a recovery, that gradients of these parameters were lost, and are used."""
        if keys:
            self._doubt(_LOST.format(names=listed([name for _, name in keys]), at=at))
            lost, known = self._gradients.lost, self._gradients.has_updated
            for number in [number for number in lost if not known(number)]:
                del lost[number]

    @unseen
    def _made_zero(self, owner: Any) -> None:
        lost, waiting = self._gradients.lost, self._gradients.waiting
        self._owners.append(weakref.ref(owner))
        if not waiting and not lost:
            return
        for number in map(id, _parameters_of(owner)):
            lost.pop(number, None)
            if number in waiting:
                self._zeroed.add(number)

    def _wrap(self, owner: Any) -> None:
        original = owner.zero_grad
        left = self

        @functools.wraps(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            if sees_calls():
                left._gradients.note_each()
            left._made_zero(self)
            result = original(self, *args, **kwargs)
            if not (args[0] if args else kwargs.get("set_to_none", True)):
                left._gradients.note_zeros(_parameters_of(self))
            return result

        def undo() -> None:
            owner.zero_grad = original

        owner.zero_grad = zero_grad
        self._undo.append(undo)


def _parameters_of(owner: Any) -> list[Any]:
    if owner is None:  # it exists no longer
        return []
    return list(owner.parameters()) if isinstance(owner, nn.Module) else parameters_of(owner)
