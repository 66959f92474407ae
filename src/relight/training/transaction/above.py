"""Values that code above the block of a step has set, for code after an interrupted block.

Such a block is undone as a whole, with the code above it. Code after it may expect what that code has done, though: a
section that was opened, a time that was taken. It finds that again, and is undone in its turn.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from relight.training.state.handed.schedulers import own_state_dict
from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.modules.plain_values import plain_bytes
from relight.training.state.values.kinds import PLAIN

_GONE = object()  # no value
_OF_TORCH = (LRScheduler, torch.amp.GradScaler)  # which code above the block does not take apart


class Above:
    """Remembers plain values, as the block begins: of modules, of parameter groups, of objects with a `state_dict`."""

    def __init__(
        self, attributes: AttributeLog, optimizers: Mapping[str, Optimizer], objects: Mapping[str, Any]
    ) -> None:
        self._attributes, self._optimizers = attributes, optimizers
        self._objects = [thing for thing in objects.values() if not isinstance(thing, _OF_TORCH)]
        self._set: list[tuple[nn.Module, str, Any]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[Any, Any]] = []

    def remember(self) -> None:
        """The block begins."""
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        self._groups = [(group, _plain(group)) for group in groups]
        self._set = []
        for module, name in self._attributes.changed():
            value = vars(module).get(name, _GONE)
            if value is _GONE or plain_bytes(value) is not None:
                self._set.append((module, name, copy.deepcopy(value) if value is not _GONE else _GONE))
        states = [(thing, own_state_dict(thing)) for thing in self._objects]
        self._states = [(thing, copy.deepcopy(state)) for thing, state in states if plain_bytes(state) is not None]

    def repeat(self) -> None:
        """Set them again, after the step was undone: in objects of their own, as the others must stay as they are."""
        for module, name, value in self._set:
            if value is not _GONE:
                setattr(module, name, value)
            elif name in vars(module):
                delattr(module, name)
        for group, values in self._groups:
            for name in _plain(group).keys() - values.keys():
                del group[name]
            group.update(values)
        for thing, state in self._states:
            thing.load_state_dict(state)
        self._set, self._groups, self._states = [], [], []


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if type(value) in PLAIN}
