"""Plain values: numbers, strings, tensors, arrays of NumPy, and lists, tuples and dicts of these."""

import copy
from dataclasses import fields
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, str, np.generic, type(None))


def names_of(kind: Any) -> list[str]:
    """The names of a dataclass's fields."""
    return [each.name for each in fields(kind)]


def is_plain(value: Any) -> bool:
    """Return whether a value is one of these, and a tensor that no gradient flows through."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, torch.Tensor):
        return value.is_leaf and not value.requires_grad
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return type(value) in (list, tuple) and all(map(is_plain, value))


def copied(value: Any) -> Any:
    """Return a copy that later changes do not reach."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def like(present: Any, value: Any) -> Any:
    """Return a copy of a saved value, whose dicts are of the kind that this process has: a defaultdict stays one."""
    if not isinstance(value, dict):
        return copied(value)
    made: dict[str, Any] = {}
    if isinstance(present, dict):
        made = copy.copy(present)
        made.clear()
    for key, each in value.items():
        made[key] = like(present.get(key) if isinstance(present, dict) else None, each)
    return made
