"""Parts of the state by names: modules, parameters, buffers, views of these, optimizers and what they hold.

A script may keep any of them in a variable of its own: the layer of this stage, `net.state_dict()`, a momentum. A
replacement has the same parts at other addresses, so what is carried is the name, and a view's geometry.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from relight.script_files import is_user_type
from relight.training.state.modules.slots import Slots, memory_of
from relight.training.torch_private.distributed.mesh import is_distributed

Name = Sequence[Any]  # strings, numbers, and names of what holds a part


class NumberedStep(Protocol):
    """A step of the loop, as a script may keep it."""

    number: int
    attempt: int


class NotNameable(Exception):
    """A value that shares memory with a part and is not simply a view of it. The message says what it is."""


class References:
    """Looks parts up by identity or memory, and by name."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        objects: Mapping[str, Any],
        slots: Slots,
    ) -> None:
        self._modules, self._optimizers, self._objects, self._slots = modules, optimizers, objects, slots
        self._data: dict[int, Any] = {}
        self._steps: tuple[type[NumberedStep], Callable[[int, int], Any]] | None = None
        self._things: dict[int, Name] = {}
        for owner, module in modules.items():
            for path, inner in module.named_modules():
                self._things.setdefault(id(inner), ("module", owner, path))
        for name, thing in objects.items():
            self._things.setdefault(id(thing), ("object", name))
        for name, optimizer in optimizers.items():
            self._things.setdefault(id(optimizer), ("optimizer", name))
        self._of_memory: dict[int, Name] = {}  # of the optimizers' own tensors, as of so many of them
        self._entries: list[tuple[int, int]] = []  # what `_of_memory` was made of

    def add_data(self, data: Any) -> None:
        """Name the loaders that batches come from: relight keeps where each is."""
        for index, thing in enumerate(data if isinstance(data, (tuple, list)) else [data]):
            if isinstance(thing, DataLoader) and not is_user_type(type(thing)):
                self._data[index] = thing
                self._things.setdefault(id(thing), ("data", index))

    def expect_steps(self, kind: type[NumberedStep], committed: Callable[[int, int], Any]) -> None:
        """Name objects of this class, steps of the loop, by `number` and `attempt`; another process makes its own."""
        self._steps = kind, committed

    def name_of(self, value: Any) -> Name | None:
        """Return the name of a part; None for other values.

        Raises NotNameable for a value that shares memory with a part and is not simply a view of it.
        """
        if isinstance(value, torch.Tensor):
            return self._name_of_tensor(value)
        if isinstance(value, (dict, list)):
            found = self._has_container(value)
            return next((name for name, thing in self._containers() if thing is value), None) if found else None
        if self._steps is not None and isinstance(value, self._steps[0]):
            return ("step", value.number, value.attempt)
        name = self._things.get(id(value))
        return name if name is not None and self._is_at(name, value) else None

    def at(self, name: Name) -> Any:
        """Return the part of this name. Raises LookupError if this process has none."""
        try:
            return self._part(*name)
        except (KeyError, IndexError, AttributeError) as error:
            raise LookupError(f"no {' '.join(map(str, name))} in this process") from error

    def owners(self) -> Iterator[tuple[Sequence[str], Any]]:
        """Names and objects of modules and parameters, on which a script may set attributes."""
        for owner, module in self._modules.items():
            for path, inner in module.named_modules():
                yield ("module", owner, path), inner
        for key, parameter in self._slots.parameters.items():
            yield ("slot", *key), parameter

    def optimizers(self) -> Iterator[tuple[str, Optimizer]]:
        """Return the optimizers, by name."""
        return iter(self._optimizers.items())

    def _part(self, kind: str, first: Any, second: Any = None, path: str = "") -> Any:
        match kind:
            case "module":
                return self._modules[first].get_submodule(second)
            case "slot":
                return self._slot(first, second)
            case "tensor":
                return _view(self.at(first), second)
            case "entry":
                return self.at(first)[second]
            case "object":
                return self._objects[first]
            case "data":
                return self._data[first]
            case "step" if self._steps is not None:
                return self._steps[1](first, second)
        optimizer = self._optimizers[first]
        match kind:
            case "groups":
                return optimizer.param_groups
            case "group":
                return optimizer.param_groups[second]
            case "members":
                return optimizer.param_groups[second]["params"]
            case "states":
                return optimizer.state
            case "state":
                return optimizer.state[self._slot(second, path)]
            case "optimizer":
                return optimizer
        raise KeyError(kind)

    def _slot(self, owner: str, path: str) -> torch.Tensor:
        return self._slots.get((owner, path))

    def _is_at(self, name: Name, value: Any) -> bool:
        """The script may have put another module there, and this one away."""
        try:
            return self.at(name) is value
        except LookupError:
            return False

    def _has_container(self, value: Any) -> bool:
        """Return whether an optimizer keeps this container; most are the script's own, so a miss has to be fast."""
        for optimizer in self._optimizers.values():
            if value is optimizer.state or value is optimizer.param_groups:
                return True
            for group in optimizer.param_groups:
                if value is group or value is group["params"]:
                    return True
            if isinstance(value, dict) and any(map(operator.is_, optimizer.state.values(), itertools.repeat(value))):
                return True
        return False

    def _containers(self) -> Iterator[tuple[Name, Any]]:
        for name, optimizer in self._optimizers.items():
            yield ("groups", name), optimizer.param_groups
            yield ("states", name), optimizer.state
            for index, group in enumerate(optimizer.param_groups):
                yield ("group", name, index), group
                yield ("members", name, index), group["params"]
            for parameter, state in optimizer.state.items():
                key = self._slots.by_id.get(id(parameter))
                if key is not None:
                    yield ("state", name, *key), state

    # --- tensors -----------------------------------------------------------------------------------------------
    def _name_of_tensor(self, value: torch.Tensor) -> Name | None:
        key = self._slots.by_id.get(id(value))
        if key is not None:
            return ("slot", *key)
        holder = self._slots.holder(value)
        part = self._own_tensor(value) if holder is None else ("slot", *self._slots.by_id[id(holder)])
        if part is None:
            return None
        return part if self.at(part) is value else ("tensor", part, _geometry(value, self.at(part)))

    def _own_tensor(self, value: torch.Tensor) -> Name | None:
        """Return the name of a tensor that an optimizer keeps, such as a momentum."""
        entries = [(id(optimizer.state), len(optimizer.state)) for optimizer in self._optimizers.values()]
        if entries != self._entries:
            self._entries = entries
            self._of_memory = {
                memory_of(tensor): ("entry", name, key)
                for name, state in self._containers()
                if name[0] == "state"
                for key, tensor in state.items()
                if isinstance(tensor, torch.Tensor)
            }
        name = self._of_memory.get(memory_of(value)) if memory_of(value) else None
        if name is None:
            return None
        try:
            return name if memory_of(self.at(name)) == memory_of(value) else None
        except LookupError:
            return None


def _geometry(value: torch.Tensor, part: torch.Tensor) -> list[Any]:
    """Return the position of a view in the memory of a part."""
    if value.requires_grad:
        raise NotNameable("a view of a parameter, with the graph that it was computed in")
    if is_distributed(part) or is_distributed(value):
        if type(value) is not type(part) or value.shape != part.shape:
            raise NotNameable("a view of a divided parameter")
        return []
    if value.dtype != part.dtype or type(value) is not torch.Tensor:
        raise NotNameable(f"a {type(value).__name__} of {value.dtype} in the memory of one of {part.dtype}")
    return [list(value.shape), list(value.stride()), value.storage_offset() - part.storage_offset()]


def _view(part: torch.Tensor, geometry: list[Any]) -> torch.Tensor:
    whole = part.detach()
    if not geometry:
        return whole
    shape, stride, offset = geometry
    first = part.storage_offset() + offset
    end = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if first < 0 or end > part.untyped_storage().nbytes() // part.element_size():
        raise LookupError("a tensor in which a step has laid several parameters, each of which has its own memory here")
    return whole.as_strided(shape, stride, first)
