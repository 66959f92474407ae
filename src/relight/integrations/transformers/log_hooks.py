"""Callbacks whose `on_log` belongs to the step, as it may change the Trainer's control, or what they hold.

Others only report. They are called once a step is committed, so that nothing is reported twice.
"""

import dis
import inspect
import itertools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from relight.integrations.trainers.held import is_own_object

_STORES = {"STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_GLOBAL", "STORE_DEREF"}
_CONTAINERS = (list, dict, set, deque, bytearray)
_CONTROL = "control"


def belongs_to_step(callback: Any) -> bool:
    """Return whether `on_log` of a callback changes anything but files and services, as far as its code shows.

    Of a class that is not the script's own, only changes of the control count.
    """
    is_own = is_own_object(callback)
    for function in _functions_of(callback, callback.on_log, set()):
        instructions = list(dis.get_instructions(function))
        if _uses_control(instructions) or (is_own and _may_change(callback, function, instructions)):
            return True
    return False


def _functions_of(callback: Any, function: Any, seen: set[Any]) -> Iterator[types.FunctionType]:
    """A function, and the methods of the callback that it names."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or function in seen:
        return
    seen.add(function)
    yield function
    for name in function.__code__.co_names:
        yield from _functions_of(callback, getattr(type(callback), name, None), seen)


def _uses_control(instructions: list[dis.Instruction]) -> bool:
    """Return whether the control is used in another way than to return it."""
    return any(
        "LOAD_FAST" in each.opname and _CONTROL in _variables_of(each) and after.opname != "RETURN_VALUE"
        for each, after in itertools.pairwise(instructions)
    )


def _variables_of(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the local variables that an instruction uses: from Python 3.13 on, some use two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def _may_change(callback: Any, function: types.FunctionType, instructions: list[dis.Instruction]) -> bool:
    """Return whether a function sets something, or uses a container or an object of the script's own."""
    if any(each.opname in _STORES for each in instructions):
        return True
    names = {**function.__globals__, **vars(callback)}
    used = [names.get(name) for name in function.__code__.co_names]
    used += inspect.getclosurevars(function).nonlocals.values()
    return any(type(each) in _CONTAINERS or (is_own_object(each) and each is not callback) for each in used)
