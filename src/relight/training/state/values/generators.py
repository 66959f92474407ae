"""Memories of random generators, counters and files in memory, as values that can be compared and set again."""

import ast
import copy
import ctypes
import itertools
import random
from typing import Any

import torch

_SEEDS = "seed_seq"  # beside the state that NumPy itself gives a generator
_OWN = "own"  # beside the state of a generator of the script's own class
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_DEEPEST = 4  # containers, one inside another


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

    One of NumPy's generators also counts the generators that it has spawned. An object of a class made from
    `random.Random` has attributes of its own: its plain ones, and containers of these, belong to it.
    """
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        state = random.Random.getstate(value)
        return state if type(value) is random.Random else {"state": state, _OWN: _own_attributes(value)}
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
        random.Random.setstate(value, state["state"] if isinstance(state, dict) else state)
        if isinstance(state, dict):
            _set_own_attributes(value, state[_OWN])
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


def _own_attributes(generator: random.Random) -> dict[str, Any]:
    found = {name: one for name, one in vars(generator).items() if name != "gauss_next" and _is_plain(one, 0)}
    return copy.deepcopy(found)


def _set_own_attributes(generator: random.Random, saved: dict[str, Any]) -> None:
    """Set them as they were; lists and dicts in place, since others may hold these."""
    own = vars(generator)
    for name in _own_attributes(generator).keys() - saved.keys():
        del own[name]
    for name, one in copy.deepcopy(saved).items():
        now = own.get(name)
        if type(now) is type(one) is list:
            now[:] = one
        elif type(now) is type(one) is dict:
            now.clear()
            now.update(one)
        else:
            own[name] = one


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) not in (list, tuple, dict) or depth > _DEEPEST:
        return False
    members = itertools.chain(value, value.values()) if type(value) is dict else value
    return all(_is_plain(one, depth + 1) for one in members)


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
