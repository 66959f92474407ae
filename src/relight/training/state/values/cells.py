"""Numbers in C's memory: of `ctypes`, and those of `multiprocessing.Value` and `Array`, which processes share."""

import ctypes
from typing import Any

_SIMPLE: Any = ctypes.c_int.__base__  # of which all numbers of ctypes are made
_NUMBERS = frozenset("?cbBhHiIlLqQfdgu")  # codes of ctypes; pointers and Python's objects are none


def is_type_of_cells(kind: type) -> bool:
    """Return whether all that values of this class hold is memory of a fixed size, without pointers."""
    if kind.__module__ == "multiprocessing.sharedctypes":
        return kind.__name__.startswith("Synchronized")
    if issubclass(kind, _SIMPLE):
        return getattr(kind, "_type_", "") in _NUMBERS
    if issubclass(kind, ctypes.Array):
        inner: Any = getattr(kind, "_type_", object)
        return is_type_of_cells(inner)
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        return all(is_type_of_cells(field[1]) for base in kind.__mro__ for field in vars(base).get("_fields_", ()))
    return False


def cells_state(value: Any) -> bytes:
    """Return the memory of a value whose class holds cells."""
    return bytes(_memory_of(value))


def set_cells_state(value: Any, state: bytes) -> None:
    """Write that memory. Raises ValueError if it is not as large."""
    memory = _memory_of(value)
    if len(memory) != len(state):
        raise ValueError(f"{len(state)} bytes for memory of {len(memory)}")
    memory[:] = state


def _memory_of(value: Any) -> memoryview:
    cells = value.get_obj() if type(value).__module__ == "multiprocessing.sharedctypes" else value
    return memoryview((ctypes.c_ubyte * ctypes.sizeof(cells)).from_buffer(cells)).cast("B")
