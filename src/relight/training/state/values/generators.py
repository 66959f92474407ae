"""Memories of random generators and of files in memory, as values that can be compared and set again."""

import random
from typing import Any

import torch


def stream_state(value: Any) -> tuple[Any, int]:
    """The memory of a file in memory: its contents, and where it is read or written next. Closed ones hold nothing."""
    return ("", -1) if value.closed else (value.getvalue(), value.tell())


def set_stream_state(value: Any, state: tuple[Any, int]) -> None:
    contents, position = state
    if position < 0 or value.closed:
        return
    value.seek(0)
    value.truncate()
    value.write(contents)
    value.seek(position)


def generator_state(value: Any) -> Any:
    """The memory of an object that random numbers are drawn from."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return value.get_state() if hasattr(value, "get_state") else getattr(value, "bit_generator", value).state


def set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        getattr(value, "bit_generator", value).state = state


def same_state(left: Any, right: Any) -> bool:
    """Compare two states of one generator."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[name], right[name]) for name in left)
    if isinstance(left, tuple) and len(left) < 100:
        return len(left) == len(right) and all(map(same_state, left, right))
    return bool(left.tobytes() == right.tobytes()) if hasattr(left, "tobytes") else bool(left == right)
