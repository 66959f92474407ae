"""Attributes of modules that code above the block of a step has changed, for code after an interrupted block.

Such a block is undone as a whole, with the code above it. Code after it may expect what that code has done, though: a
section that was opened, a time that was taken. It finds that again, and is undone in its turn.
"""

import copy
from typing import Any

from torch import nn

from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.modules.plain_values import plain_bytes

_GONE = object()  # no value


class Above:
    """Remembers, as the block begins, what has changed since the loop asked for the step."""

    def __init__(self, attributes: AttributeLog) -> None:
        self._attributes = attributes
        self._values: list[tuple[nn.Module, str, Any]] = []

    def remember(self) -> None:
        """The block begins: remember plain values that code above it has set."""
        self._values = []
        for module, name in self._attributes.changed():
            value = vars(module).get(name, _GONE)
            if value is _GONE or plain_bytes(value) is not None:
                self._values.append((module, name, copy.deepcopy(value) if value is not _GONE else _GONE))

    def repeat(self) -> None:
        """Set them again, after the step was undone: in objects of their own, as the others must stay as they are."""
        for module, name, value in self._values:
            if value is not _GONE:
                setattr(module, name, value)
            elif name in vars(module):
                delattr(module, name)
        self._values = []
