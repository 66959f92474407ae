"""Copies of what a step may change, from before it does: tensors, optimizers, and other objects with a `state_dict`.

A copy is taken once a step, before the first change. Memory for tensors that are copied in every step is kept.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer

from relight.training.state.handed.schedulers import own_state_dict
from relight.training.state.modules.slots import Key, Slots
from relight.training.state.value_images import Copies, Restorer, copied
from relight.training.state.values.bits import same_bits
from relight.training.state.values.kinds import PLAIN
from relight.training.torch_private.distributed.zero import state_of
from relight.training.torch_private.tensors import version_of
from relight.training.transaction.data_access import DataAccess
from relight.transfer.io.codec import local_part

_MOST_MARKED = 64  # parameters of an optimizer whose state is looked at in every step


class TensorImages:
    """Copies of parameters and buffers."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._taken: dict[Key, torch.Tensor] = {}
        self._kept: dict[Key, torch.Tensor] = {}  # memory of copies that were given back

    def __contains__(self, key: Key) -> bool:
        return key in self._taken

    @property
    def nbytes(self) -> int:
        """Memory of all copies, in use or not, in bytes."""
        return sum(tensor.nbytes for tensor in (*self._taken.values(), *self._kept.values()))

    def adopt(self, key: Key, copied: torch.Tensor) -> None:
        """Take over a copy that was made before the step."""
        self._taken[key] = copied

    def take(self, keys: Iterable[Key]) -> None:
        """Copy these tensors, unless that was done in this step."""
        missing = [key for key in keys if key not in self._taken]
        if not missing:
            return
        with torch.no_grad():
            for key in dict.fromkeys(missing):
                live, kept = local_part(self._slots.get(key)), self._kept.pop(key, None)
                if kept is not None and kept.shape == live.shape and kept.dtype == live.dtype:
                    self._taken[key] = kept.copy_(live)
                else:
                    self._taken[key] = live.clone()

    def changed(self, keys: Iterable[Key]) -> list[Key]:
        """Return the copied tensors whose bits differ from their copies."""
        return [
            key
            for key in keys
            if (before := self._taken.get(key)) is not None
            and (before.shape != local_part(now := self._slots.get(key)).shape or not same_bits(before, now))
        ]

    def put_back(self) -> None:
        with torch.no_grad():
            for key, before in self._taken.items():
                live = local_part(self._slots.get(key))
                if live.shape != before.shape or live.dtype != before.dtype:
                    self._slots.replace(key, before.clone())
                elif not same_bits(before, live):
                    live.copy_(before)

    def drop(self, *, keep: bool = True) -> None:
        """Give up the copies. `keep`: keep their memory for the next step."""
        self._kept = {**self._kept, **self._taken} if keep else {}
        self._taken = {}


class OptimizerImages:
    """Hyperparameters of all optimizers at the start of a step, and the state of those that write, before they do."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        # Those around others, such as Lookahead: they write without a hook, before and after the one inside.
        known = {id(one) for one in optimizers.values()}
        self._around = [
            name for name, one in optimizers.items() if any(id(inner) in known for inner in vars(one).values())
        ]
        self._groups: dict[str, list[tuple[dict[str, Any], dict[str, Any], list[Any]]]] = {}
        self._states: dict[str, dict[Any, Any]] = {}
        self._marks: dict[str, list[tuple[int, int]]] = {}  # of some tensors of the state, as the step began

    def begin(self) -> None:
        self._states = {}
        self._marks = {name: self._some_of(name) for name in self._optimizers}
        for name, optimizer in self._optimizers.items():
            self._groups[name] = [
                (group, _hyperparameters(group), [*group["params"]]) for group in optimizer.param_groups
            ]
        for name in self._around:
            self.take(name)

    def take(self, name: str) -> None:
        """Copy an optimizer's state, unless that was done in this step."""
        if name not in self._states:
            copies: Copies = {}
            state = state_of(self._optimizers[name])
            self._states[name] = {key: copied(value, copies) for key, value in state.items()}

    def changed(self) -> list[Key]:
        """Name the optimizers whose state the step has changed in front of their writes, so that there is no copy."""
        names = [name for name, marks in self._marks.items() if name not in self._states]
        return [(name, "state") for name in names if self._some_of(name) != self._marks[name]]

    def _some_of(self, name: str) -> list[tuple[int, int]]:
        """Return which tensors the state of some parameters has, and how often each was written."""
        kept = state_of(self._optimizers[name])
        some = islice(kept.values(), 0, None, len(kept) // _MOST_MARKED + 1)
        dicts = (values for values in some if isinstance(values, dict))  # optimizers may keep other values beside these
        tensors = [one for values in dicts for one in values.values() if isinstance(one, torch.Tensor)]
        return [(len(kept), 0), *((id(one), version_of(one)) for one in tensors if not one.is_inference())]

    def take_all(self) -> None:
        for name in self._optimizers:
            self.take(name)

    def put_back(self) -> None:
        with torch.no_grad():
            restored = Restorer().restored
            for name, groups in self._groups.items():
                optimizer = self._optimizers[name]
                for group, before, parameters in groups:
                    tensors = {k: v for k, v in group.items() if k != "params" and isinstance(v, torch.Tensor)}
                    group.clear()
                    group["params"] = parameters
                    group.update({key: restored(tensors.get(key), value) for key, value in before.items()})
                optimizer.param_groups[:] = [group for group, _, _ in groups]
            for name, states in self._states.items():
                live = state_of(self._optimizers[name])
                for key in [key for key in live if key not in states]:
                    del live[key]
                for key, before in states.items():
                    live[key] = restored(live.get(key), before)
        self._groups, self._states = {}, {}

    def drop(self) -> None:
        self._groups, self._states = {}, {}


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Copy them: most are numbers, which need no copies."""
    found = group.copy()
    del found["params"]
    if not PLAIN.issuperset(map(type, found.values())):
        found = {name: copied(value, {}) for name, value in found.items()}
    return found


class ObjectImages:
    """The `state_dict` of other objects at the start of a step."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        self._taken: dict[str, Any] = {}

    def take(self, names: Iterable[str]) -> None:
        self._taken = {name: copy.deepcopy(own_state_dict(self._objects[name])) for name in names}

    def put_back(self) -> None:
        for name, before in self._taken.items():
            self._objects[name].load_state_dict(copy.deepcopy(before))

    def drop(self) -> None:
        self._taken = {}


class FlagImages:
    """`requires_grad` of the parameters at the start of a step; of one that has a history, False (see `modes_of`)."""

    def __init__(self, parameters: Sequence[torch.Tensor], access: DataAccess) -> None:
        self._parameters = parameters
        self._access = access
        self._taken: list[bool] = []
        self._seen_flags = -1  # how often flags had been set, at the last look at all of them

    def begin(self) -> None:
        if self._access.flags_set != self._seen_flags:
            self._taken = [parameter.requires_grad and parameter.is_leaf for parameter in self._parameters]
            self._seen_flags = self._access.flags_set

    def put_back(self) -> None:
        for parameter, before in zip(self._parameters, self._taken, strict=True):
            if parameter.requires_grad != before:
                if not parameter.is_leaf:  # an average that was moved in place outside `no_grad`
                    parameter.detach_()
                parameter.requires_grad_(before)
