"""Copies of what a step may change, from before it does: tensors, optimizers, and other objects with a `state_dict`.

A copy is taken once a step, before the first change. Memory for tensors that are copied in every step is kept.
"""

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, filterfalse, islice, repeat
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from relight.training.state.handed.schedulers import own_state_dict
from relight.training.state.modules.slots import Key, Slots
from relight.training.state.value_images import Copies, Restorer, copied
from relight.training.state.values.bits import same_bits
from relight.training.state.values.kinds import PLAIN
from relight.training.torch_private.distributed.zero import state_of
from relight.training.torch_private.tensors import copy_all, version_of
from relight.training.transaction.data_access import DataAccess
from relight.transfer.io.codec import local_part

_MOST_MARKED = 64  # parameters of an optimizer whose state is looked at in every step
_DICTS = frozenset({dict})
_OF_TORCH = frozenset({torch.Tensor, torch.nn.Parameter})
_form = operator.attrgetter("shape", "dtype")


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
        missing = list(filterfalse(self._taken.__contains__, dict.fromkeys(keys)))
        if not missing:
            return
        live: list[Any] = list(map(self._slots.get, missing))
        kept: list[Any] = list(map(self._kept.pop, missing, repeat(None)))
        with torch.no_grad():
            if _are_alike(live, kept):
                copy_all(kept, live)  # in one call, as in most steps
            else:
                kept = list(map(_copied, map(local_part, live), kept))
        self._taken.update(zip(missing, kept, strict=True))

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


def _are_alike(live: list[Any], kept: list[Any]) -> bool:
    """Return whether there is memory of the same form for each of these tensors, and all are of torch's own class."""
    is_usual = _OF_TORCH.issuperset(map(type, live)) and all(map(operator.is_not, kept, repeat(None)))
    return is_usual and list(map(_form, live)) == list(map(_form, kept))


def _copied(live: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Copy a tensor into the memory of an earlier copy, if that has its form."""
    return live.clone() if kept is None or _form(kept) != _form(live) else kept.copy_(live)


class WrittenState:
    """Tensors in the state of some parameters of an optimizer, and how often each was written as a step began."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values: list[Any] = []
        self._tensors: list[torch.Tensor] = []  # among the values: another list once values are others
        self._before: tuple[Any, ...] = ()

    def begin(self) -> None:
        self._before = self._now()

    @property
    def has_changed(self) -> bool:
        """True if a tensor was written, or stands in another's place, since the step began."""
        count, tensors, versions = self._now()
        return count != self._before[0] or tensors is not self._before[1] or versions != self._before[2]

    def _now(self) -> tuple[int, list[torch.Tensor], list[int]]:
        kept = state_of(self._optimizer)
        dicts = list(islice(kept.values(), 0, None, len(kept) // _MOST_MARKED + 1))
        if not _DICTS.issuperset(map(type, dicts)):  # optimizers may keep other values beside these
            dicts = [one for one in dicts if isinstance(one, dict)]
        values = list(chain.from_iterable(map(dict.values, dicts)))
        if not (len(values) == len(self._values) and all(map(operator.is_, values, self._values))):
            self._values = values
            self._tensors = [one for one in values if isinstance(one, torch.Tensor) and not one.is_inference()]
        return len(kept), self._tensors, list(map(version_of, self._tensors))


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
        self._written = {name: WrittenState(optimizer) for name, optimizer in optimizers.items()}

    def begin(self) -> None:
        self._states = {}
        for written in self._written.values():
            written.begin()
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
        return [(name, "state") for name, one in self._written.items() if name not in self._states and one.has_changed]

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
        self._attributes: dict[str, set[str]] = {}  # names, of schedulers

    def take(self, names: Iterable[str]) -> None:
        self._taken = {name: _state_copied(self._objects[name]) for name in names}
        self._attributes = {name: set(vars(self._objects[name])) for name in self._taken if self._is_scheduler(name)}

    def put_back(self) -> None:
        for name, before in self._taken.items():
            self._objects[name].load_state_dict(copy.deepcopy(before))
        for name, attributes in self._attributes.items():  # loading leaves those that it does not know
            own = vars(self._objects[name])
            for added in own.keys() - attributes:
                del own[added]

    def drop(self) -> None:
        self._taken, self._attributes = {}, {}

    def _is_scheduler(self, name: str) -> bool:
        return isinstance(self._objects[name], LRScheduler)


def _state_copied(thing: Any) -> Any:
    state = own_state_dict(thing)
    return copied(state, {}) if isinstance(thing, LRScheduler) else copy.deepcopy(state)  # a third of the time


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
