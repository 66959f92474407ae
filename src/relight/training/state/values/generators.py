"""Memories of random generators, counters and files in memory, as values that can be compared and set again."""

import ast
import ctypes
import itertools
import random
from typing import Any

import torch

_SEEDS = "seed_seq"  # beside the state that NumPy itself gives a generator


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
    """The memory of an object that random numbers, or seeds, are drawn from.

    One of NumPy's generators also counts the generators that it has spawned.
    """
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, itertools.count):
        return repr(value)
    if hasattr(value, "get_state"):
        return value.get_state()
    if is_seeds(value):
        return value.state
    bits = getattr(value, "bit_generator", value)
    seeds = getattr(bits, "seed_seq", None)
    return {**bits.state, _SEEDS: seeds.state} if seeds is not None and is_seeds(seeds) else bits.state


def set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, itertools.count):
        _set_counter(value, state)
    elif hasattr(value, "set_state"):
        value.set_state(state)
    elif is_seeds(value):
        _set_seeds(value, state)
    else:
        bits = getattr(value, "bit_generator", value)
        bits.state = {name: one for name, one in state.items() if name != _SEEDS}
        if _SEEDS in state and is_seeds(seeds := getattr(bits, "seed_seq", None)):
            _set_seeds(seeds, state[_SEEDS])


def counter_of(state: str) -> "itertools.count[Any] | None":
    """Make a counter of this state. None: it counts by other than Python's own numbers."""
    try:
        return itertools.count(*ast.literal_eval(f"({state.removeprefix('count(')[:-1]},)"))
    except (ValueError, SyntaxError):
        return None


def _set_counter(value: "itertools.count[Any]", state: str) -> None:
    """Exchange the memory of a counter for that of a new one: bound methods and closures hold this very object."""
    made = counter_of(state)
    if made is None or repr(value) == state:
        return
    head = object.__basicsize__
    size = itertools.count.__basicsize__ - head
    own, other = ctypes.string_at(id(value) + head, size), ctypes.string_at(id(made) + head, size)
    ctypes.memmove(id(value) + head, other, size)
    ctypes.memmove(id(made) + head, own, size)


def is_seeds(value: Any) -> bool:
    """Return whether it is a `numpy.random.SeedSequence`."""
    kind = type(value)
    return kind.__name__ == "SeedSequence" and kind.__module__.startswith("numpy.")


def _set_seeds(seeds: Any, state: dict[str, Any]) -> None:
    """Make a SeedSequence one of this state, as unpickling it would: NumPy has no other way to set one."""
    if not same_state(seeds.state, state):
        seeds.__setstate__(type(seeds)(**state).__reduce__()[2])


def same_state(left: Any, right: Any) -> bool:
    """Compare two states of one generator."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[name], right[name]) for name in left)
    if isinstance(left, tuple) and len(left) < 100:
        return len(left) == len(right) and all(map(same_state, left, right))
    return bool(left.tobytes() == right.tobytes()) if hasattr(left, "tobytes") else bool(left == right)
