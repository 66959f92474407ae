"""Attributes that a script sets on parameters (`p.anchor = p.detach().clone()`): undone with the step that set them."""

from collections.abc import Sequence
from typing import Any

import torch


def own_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Those that are not private: torch, and wrappers of modules, keep their own under names with an underscore."""
    found = vars(parameter)
    return {name: value for name, value in found.items() if name[0] != "_"} if found else {}


class ParameterAttributes:
    """Those at the beginning of the step under way."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._before: dict[int, dict[str, Any]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._before = {id(one): own for one in self._parameters if vars(one) and (own := own_attributes(one))}

    def roll_back(self) -> None:
        """Every parameter has the attributes that it had when the step began."""
        for parameter in self._parameters:
            before, now = self._before.get(id(parameter), {}), own_attributes(parameter)
            for name in now.keys() - before.keys():
                del vars(parameter)[name]
            vars(parameter).update(before)
