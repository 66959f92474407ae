"""Plain values: copied, moved between devices, and made into few objects, since they are read in every step."""

import json
from collections.abc import Callable
from typing import Any

import torch

_PLAIN = (bool, int, float, str, type(None))
_PART = "\0"  # the key that stands for a value of another kind


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, string or tensor, or a list, tuple or dict of these."""
    if type(value) in _PLAIN:  # no enumerations: they would come back as plain strings
        return True
    if isinstance(value, torch.Tensor):
        return value.is_leaf and not value.requires_grad
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) in _PLAIN and is_plain(each) for key, each in value.items())
    return type(value) in (list, tuple) and all(map(is_plain, value))


def has_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or has some in its lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(has_tensors, value)))


def copied(value: Any) -> Any:
    """Return a copy of a plain value."""
    return _mapped(value, lambda tensor: tensor.detach().clone())


def moved(value: Any, device: torch.device | None) -> Any:
    """Return a copy of a plain value with its tensors on a device; None: where they are."""
    return _mapped(value, lambda tensor: tensor.clone() if device is None else tensor.clone().to(device))


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    return value


def compact(tree: Any) -> dict[str, Any]:
    """Return a text for numbers, strings, and lists and dicts of these, and beside it what else is in a tree."""
    parts: list[Any] = []

    def lean(value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return [lean(each) for each in value]
        if kind is dict and all(type(key) is str for key in value):
            return {key: lean(each) for key, each in value.items()}
        parts.append(value)
        return {_PART: len(parts) - 1}

    return {"text": json.dumps(lean(tree)), "parts": parts}


def expand(compacted: dict[str, Any]) -> Any:
    """Return the tree of which `compact` was made."""

    def whole(table: dict[str, Any]) -> Any:
        return compacted["parts"][table[_PART]] if _PART in table else table

    return json.loads(compacted["text"], object_hook=whole)
