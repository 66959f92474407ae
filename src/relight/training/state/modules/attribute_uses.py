"""Uses of a module's attributes in the code of its methods: which are read in a step before they are assigned."""

import dis
import functools
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from relight.training.state.modules.plain_values import MOST_BYTES, is_mutable, plain_bytes

_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


def is_not_kept(module: nn.Module, name: str, before: torch.Tensor, value: Any) -> bool:
    """Return whether a tensor takes another one's place in each step, and is too large or not dense.

    One method must read and assign it. A cache is none: it is made once, or anew when it must be larger.
    """
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    if plain_bytes(value, in_graphs=True) is not None or not _same_size(before, value):
        return False
    return any(reads_first(method, name) and _assigns(method, name) for method in _methods_of(module))


def describe_not_kept(path: str) -> str:
    """Say which attribute cannot be kept, and what to write instead."""
    owner, _, name = path.rpartition("/")
    return (
        f"{owner.strip('/').replace('/', '.')}.{name}: a step reads this attribute and assigns it a tensor that is "
        f"not dense, or a value larger than {MOST_BYTES >> 20} MiB, and a replacement would not get it. Make it a "
        f"buffer: self.register_buffer({name!r}, ...), of a sparse tensor its indices and values"
    )


def is_state(module: nn.Module, name: str, value: Any) -> bool:
    """Return whether an attribute that a step assigned is of use to the next one.

    A tensor that no method reads before it assigns it is a mere result.
    """
    if plain_bytes(value, in_graphs=True) is None:
        return False
    if is_mutable(value) or isinstance(value, (tuple, frozenset)):
        return any(reads_first(method, name) for method in _methods_of(module))
    return True


def reads_first(method: FunctionType | CodeType, attribute: str) -> bool:
    """Return whether some way through a function reads an attribute of this name that it has not assigned before."""
    instructions = list(dis.get_instructions(method))
    at = {instruction.offset: number for number, instruction in enumerate(instructions)}
    assigned: dict[int, bool] = {}  # before each instruction, on every way to it
    left = [(0, False)]
    while left:
        number, is_assigned = left.pop()
        if number in assigned and assigned[number] <= is_assigned:
            continue
        assigned[number] = is_assigned
        one = instructions[number]
        if one.argval == attribute:
            if not is_assigned and one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
                return True
            is_assigned |= one.opname.startswith("STORE_ATTR")
        if isinstance(one.argval, CodeType) and not is_assigned and reads_first(one.argval, attribute):
            return True  # a comprehension
        if one.opcode in _JUMPS:
            left.append((at[one.argval], is_assigned))
        if "IF_" in one.opname or not one.opname.startswith(("JUMP", "RETURN_V", "RETURN_C", "RAISE", "RERAISE")):
            left.append((number + 1, is_assigned))
    return False


def _same_size(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors have one shape; nested ones, which have none, have as many rows."""
    return one.size(0) == other.size(0) if one.is_nested and other.is_nested else one.shape == other.shape


def _assigns(method: FunctionType, attribute: str) -> bool:
    return any(one.opname == "STORE_ATTR" and one.argval == attribute for one in dis.get_instructions(method))


def _methods_of(module: nn.Module) -> tuple[FunctionType, ...]:
    return _methods(type(module))  # type: ignore[arg-type] # a class can be hashed


@functools.cache
def _methods(kind: type) -> tuple[FunctionType, ...]:
    """The methods of a class, less those of torch."""
    return tuple(
        value
        for base in kind.__mro__
        if not base.__module__.startswith("torch.") and base is not object
        for value in vars(base).values()
        if isinstance(value, FunctionType) and value.__name__ not in ("__init__", "extra_repr", "__repr__")
    )
