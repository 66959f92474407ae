"""Gradients, which are no part of the state: a recovery makes them None or zeros, as they were when the step began.

Those of parameters in no optimizer's group nothing makes zero, so that they add up from step to step; so do those of an
optimizer that pauses, and of one whose script makes them zero too early, or never. A step that is repeated for a
comparison finds them again; after a recovery they are known to be lost, also in a replacement, and in a job that goes
on from a checkpoint.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from relight.training.state.modules.modes import give_gradients, gradients_of
from relight.training.state.modules.slots import Key, Slots
from relight.training.state.optimizers.members import OptimizerMembers
from relight.training.torch_private.autograd import reset_scaler
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.tensors import version_of
from relight.transfer.io.codec import local_part

# The identity of a gradient: a weak reference, which keeps no memory and is one object for a gradient, and its version.
# Every step notes them for all parameters, so this runs in C, through `map`, and gives a list of each.
_Reference = Callable[[], torch.Tensor | None]
GradientMark = tuple[_Reference, int]
_Marks = tuple[list[_Reference], list[int]]
_NO_MARK: GradientMark = (lambda: None, 0)
_gradient, _is_leaf = operator.attrgetter("grad"), operator.attrgetter("is_leaf")


class Gradients:
    """The gradients of everything that was handed over."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        own: list[torch.nn.Parameter],
        objects: Mapping[str, Any],
        slots: Slots,
        members: OptimizerMembers,
        *,
        keepers: Iterable[Any] = (),
    ) -> None:
        """Look after the gradients of `parameters`, and of `own`, of `per_rank` modules.

        Args:
            parameters, own: see there.
            objects: that were handed over; scalers among them count what they have unscaled.
            slots: of the parameters, for their names.
            members: the parameters that optimizers update.
            keepers: objects in `per_rank`; their `kept_gradients()` returns, by `id`, parameters of which they keep
                gradients from the step before for the next one, also in a replacement.
        """
        self._keepers = list(keepers)
        self._parameters, self._own, self._slots, self._members = parameters, own, slots, members
        self._scalers = [thing for thing in objects.values() if isinstance(thing, torch.amp.GradScaler)]
        # Whether they were None, not zeros, when the step under way started; also those of `per_rank` modules.
        self.to_none = self._own_to_none = True
        self._numbers = [*map(id, parameters)]
        self._left: _Marks = [], []  # of all parameters then, if any had a gradient
        # Those that were there then, unless known as zero; by `id`. None: all of them, and not looked up yet.
        self._found: dict[int, GradientMark] | None = {}
        self._zeros: dict[int, GradientMark] = {}  # as `zero_grad` left them
        self._are_cleared = True  # by a recovery, since the last step
        self.thrown: set[int] = set()  # by `id`, parameters of `_found` whose gradients a recovery threw away
        self._notes_each = False
        self._had: list[int] = []  # by parameter, as the step began
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and what they had
        self._updated = members.updated()  # by steps that count
        self.waiting: dict[int, Key] = {}  # by `id`, parameters of optimizers that pause, as the step under way began
        self.lost: dict[int, Key] = {}  # such and other parameters, whose gradients a recovery threw away

    def see(self, *, keep: bool = False) -> None:
        """Note, as a step begins, whether they are None or zeros. `keep`: keep all for `put_back`."""
        first = next(iter(self._parameters), None)
        self.to_none = first is None or first.grad is None
        self._own_to_none = not self._own or self._own[0].grad is None
        self._left = _marks_of(self._parameters)
        self._found = {} if self._are_cleared or not self._left[0] else None
        self._are_cleared = False
        if self.waiting or self._zeros:
            found = self._all_found()
            self.waiting = {number: key for number, key in self.waiting.items() if number in found}
        if self._notes_each:
            self._had = gradients_of(self._parameters)
        if keep or self._kept:
            both = (*self._parameters, *self._own) if keep else ()
            self._kept = [(one, one.grad.detach().clone()) for one in both if one.is_leaf and one.grad is not None]

    def commit(self) -> None:
        """The step counts: optimizers have updated the parameters that they now have."""
        if self._members.joined:
            self._updated = self._members.updated()
            self._members.joined.clear()

    def note_each(self) -> None:
        """From the next step on: a mode of the script sees for how many parameters `zero_grad` finds a gradient."""
        self._notes_each = True

    @property
    def are_kept(self) -> bool:
        """True if an object in `per_rank` keeps those that wait."""
        return bool(self._keepers)

    def kept(self) -> set[int]:
        """Return, by `id`, the parameters whose gradients wait, and are kept by an object in `per_rank`."""
        return {number for keeper in self._keepers for number in keeper.kept_gradients()}

    def are_waiting(self) -> bool:
        """Return whether some are waiting for an optimizer step."""
        return have_gradients(self._parameters)

    def have_come(self) -> bool:
        """Return whether some are waiting, and are not those that an earlier update has left, as the step began.

        Many scripts call `zero_grad` at the head of a step, before its backward pass.
        """
        if not self.to_none and all(map(_is_same, _pairs(self._left), _pairs(_marks_of(self._parameters)))):
            return False
        return self.are_waiting()

    def note_zeros(self, parameters: Iterable[torch.Tensor]) -> None:
        """The script has just made the gradients of these zeros."""
        parameters = list(parameters)
        self._zeros |= zip(map(id, parameters), _pairs(_marks_of(parameters)), strict=False)

    def see_backward(self) -> None:
        """A backward pass begins: what adds to gradients that are zero by now, perhaps by hand, adds to none."""
        if self._found is None and not any(map(operator.is_not, map(operator.call, self._left[0]), repeat(None))):
            self._found = {}  # in most steps: they were made None, and no tensor of theirs is left
        if not (found := self._all_found()):
            return
        gradients = _gradients_of(self._parameters)
        if not any(map(operator.is_not, gradients, repeat(None))):
            found.clear()
            return
        for number, parameter, gradient in zip(self._numbers, self._parameters, gradients, strict=True):
            mark = found.get(number)
            if mark is not None and mark[0]() is gradient and not have_gradients([parameter]):
                del found[number]

    def added_to(self, parameters: Iterable[torch.Tensor]) -> set[int] | None:
        """Return, by `id`, those of these parameters whose gradients of earlier steps this step has added to.

        None: there were no gradients when the step began, so that it shows nothing.
        """
        found = self._all_found()
        held = [(one, found[id(one)]) for one in parameters if id(one) in found] if found else []
        if not held:
            return None
        return {
            id(one)
            for one, was in held
            if (now := one.grad) is not None and was[0]() is now and version_of(now) != was[1]
        }

    def put_back(self) -> None:
        """Make them what `see` has kept."""
        self._make_zero()
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []

    def clear(self) -> None:
        """Make all what they were when the step under way began, None or zeros: a replacement has no others.

        Flags are those of the step's beginning: a parameter that was frozen had no gradient, before it joined a group.
        """
        joined = self._members.joined
        self.lost |= self.named(
            one for one in self._others() if (one.requires_grad if id(one) in joined else have_gradients([one]))
        )
        self.lost |= self.waiting
        self.waiting = {}
        self.thrown |= self._all_found().keys()
        self._found, self._are_cleared = {}, True
        self._make_zero()
        self._kept = []

    def missing(self) -> list[Key]:
        """Return the parameters whose gradients a later step may use, and which a copy of the state lacks."""
        others = self.named(one for one in self._others() if have_gradients([one]))
        return sorted((self.lost | self.waiting | others).values())

    def adopt_missing(self, missing: Iterable[Iterable[str]]) -> None:
        """Take on what `missing` returned where the state was copied from; gradients of a rehearsal are not missed."""
        found = (self._slots.parameters.get((owner, name)) for owner, name in missing)
        self.lost, self.waiting = self.named(one for one in found if one is not None), {}
        self.commit()

    def has_updated(self, number: int) -> bool:
        """Return whether an optimizer has had the parameter of this `id`, before the step under way."""
        return number in self._updated

    def named(self, parameters: Iterable[torch.Tensor]) -> dict[int, Key]:
        """Return the names of parameters by their ids; those of no module are left out."""
        return {id(one): self._slots.by_id[id(one)] for one in parameters if id(one) in self._slots.by_id}

    def _others(self) -> Iterator[torch.Tensor]:
        return (one for one in self._parameters if id(one) not in self._updated and one.is_leaf)

    def _all_found(self) -> dict[int, GradientMark]:
        """Return `_found`, looked up."""
        if self._found is None:
            marks, zeros = zip(self._numbers, _pairs(self._left), strict=True), self._zeros
            self._found = {
                number: mark
                for number, mark in marks
                if mark[0] is not _NO_MARK[0] and not _is_same(mark, zeros.get(number, _NO_MARK))
            }
        return self._found

    def _make_zero(self) -> None:
        for scaler in self._scalers:
            reset_scaler(scaler)
        for parameter in self._parameters:
            if self.to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                # In a process that took another rank, a divided gradient may still have the size of another part.
                parameter.grad = torch.zeros_like(parameter if is_distributed(parameter) else parameter.grad)
        if not self.to_none:
            give_gradients(self._parameters, self._had)
        for parameter in self._own:
            if parameter.grad is not None:
                parameter.grad = None if self._own_to_none else torch.zeros_like(parameter.grad)


def _gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return them without the warning that torch gives for a tensor which is no leaf."""
    if all(map(_is_leaf, parameters)):
        return list(map(_gradient, parameters))
    return [one.grad if one.is_leaf else None for one in parameters]


def _marks_of(parameters: Sequence[torch.Tensor]) -> _Marks:
    """Return what the gradient of each parameter is known by; empty lists if none has one."""
    gradients: Any = _gradients_of(parameters)
    try:
        return list(map(weakref.ref, gradients)), list(map(version_of, gradients))
    except TypeError:  # some have none
        marks = [_NO_MARK if one is None else (weakref.ref(one), version_of(one)) for one in gradients]
    if all(map(operator.is_, gradients, repeat(None))):
        return [], []
    return [reference for reference, _ in marks], [version for _, version in marks]


def _pairs(marks: _Marks) -> Iterable[GradientMark]:
    return zip(*marks, strict=True)


def _is_same(one: GradientMark, other: GradientMark) -> bool:
    """Return whether both are of the same gradient, not written since."""
    return one[0] is other[0] and one[1] == other[1]


def have_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether some have gradients other than zero. On a device this waits for it, unless gradients are None."""
    return any(p.grad is not None and bool(local_part(p.grad).count_nonzero()) for p in parameters)
