"""Attributes that the `state_dict` and `load_state_dict` of an object name: the object keeps these by itself."""

import dis
import inspect
import itertools
import types
from collections.abc import Iterator
from typing import Any

from relight.script_files import is_user_type
from relight.training.state.values.kinds import attributes_of, kind_of

_METHODS = ("state_dict", "load_state_dict")
_USES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")  # an attribute of what was loaded before
_MISSING = object()


def attributes_of_state(thing: Any) -> frozenset[str] | None:
    """The attributes that these methods read or set, also through other methods and properties of the object.

    None: this cannot be told (`vars(self)`, a method of a library's class), or it is no object of the script's.
    """
    kind = type(thing)
    if not is_user_type(kind) or kind_of(thing) != "object" or not attributes_of(thing).keys().isdisjoint(_METHODS):
        return None
    found: set[str] = set()
    seen: set[str] = set()
    return frozenset(found) if all(_follow(name, kind, found, seen) for name in _METHODS) else None


def _follow(name: str, kind: type, found: set[str], seen: set[str]) -> bool:
    """Add the attributes that one name stands for. False: they cannot be told."""
    if name in seen:
        return True
    seen.add(name)
    member = inspect.getattr_static(kind, name, _MISSING)
    if isinstance(member, (classmethod, staticmethod)):
        return True
    if isinstance(member, property):
        member = member.fget
    if isinstance(member, types.FunctionType):
        function = inspect.unwrap(member)
        names = _names_in(function.__code__) if isinstance(function, types.FunctionType) else None
        return names is not None and all(_follow(one, kind, found, seen) for one in sorted(names))
    is_attribute = not hasattr(type(member), "__get__") or isinstance(member, types.MemberDescriptorType)
    found.add(name)
    return is_attribute and name not in _METHODS


def _names_in(code: types.CodeType) -> set[str] | None:
    """Attributes of the first argument. None: it is used otherwise as well (`super()`), or there is none."""
    if not code.co_argcount:
        return None
    own, found = code.co_varnames[0], set[str]()
    for here in _codes_in(code):
        if "super" in here.co_names:
            return None
        instructions = [one for one in dis.get_instructions(here) if one.opname != "CACHE"]
        for one, after in itertools.pairwise(instructions):
            names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            if own not in names or not one.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_")):
                continue
            if len(names) > 1 or one.opname.startswith("STORE_") or after.opname not in _USES:
                return None
            found.add(after.argval)
    return found


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes_in(one)
