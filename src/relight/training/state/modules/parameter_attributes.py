"""Attributes that a script sets on parameters (`p.anchor = p.detach().clone()`): undone with the step that set them."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch


def own_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return attributes without an underscore in front, under which torch and wrappers of modules keep their own."""
    found = vars(parameter)
    return {name: value for name, value in found.items() if name[0] != "_"} if found else {}


_attributes = attrgetter("__dict__")


class ParameterAttributes:
    """The attributes of parameters at the beginning of the step under way."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._before: dict[int, dict[str, Any]] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._before = {}
        if any(map(_attributes, self._parameters)):  # mostly there are none, and this takes half the time
            self._before = {id(one): found.copy() for one in self._parameters if (found := _attributes(one))}

    def roll_back(self) -> None:
        """Give every parameter the attributes that it had when the step began."""
        for parameter in self._parameters:
            before, now = self._before.get(id(parameter), {}), own_attributes(parameter)
            for name in now.keys() - before.keys():
                del vars(parameter)[name]
            vars(parameter).update((name, value) for name, value in before.items() if name[0] != "_")
