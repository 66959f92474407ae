"""Values that code above the block of a step has set, for code after an interrupted block.

Such a block is undone as a whole, with the code above it. Code after it may expect what that code has done, though: a
section that was opened, a time that was taken. It finds that again, and is undone in its turn.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from relight.script_files import is_user_type
from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.modules.plain_values import EXCERPT_BYTES, plain_bytes
from relight.training.state.values.kinds import PLAIN

_GONE = object()  # no value


class Above:
    """Remembers small plain values, as the block begins.

    They are attributes of modules, values in parameter groups, and the `state_dict` of objects of the script's own.
    """

    def __init__(
        self, attributes: AttributeLog, optimizers: Mapping[str, Optimizer], objects: Mapping[str, Any]
    ) -> None:
        self._attributes, self._optimizers = attributes, optimizers
        self._objects = [thing for thing in objects.values() if is_user_type(type(thing))]
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
            if value is _GONE or _is_small(value):
                self._set.append((module, name, copy.deepcopy(value) if value is not _GONE else _GONE))
        states = [(thing, thing.state_dict()) for thing in self._objects]
        self._states = [(thing, copy.deepcopy(state)) for thing, state in states if _is_small(state)]
        self._objects = [thing for thing, _ in self._states]  # what is large is not asked again

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


def _is_small(value: Any) -> bool:
    return plain_bytes(value, EXCERPT_BYTES) is not None


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if type(value) in PLAIN}
