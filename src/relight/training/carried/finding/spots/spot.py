"""One value in a process, which can be read and set: a name, an item, an attribute, a variable of a closure."""

import contextlib
import functools
import inspect
import types
from collections import defaultdict, deque
from collections.abc import Callable
from types import CellType
from typing import Any

from torch import nn

from relight.training.state.values.kinds import attributes_of
from relight.training.torch_private.modules import buffers_in, hook_table, modules_in, parameters_in

BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
# Around functions: the attributes that hold these, and what goes to them. They never hold others.
AROUND_FUNCTIONS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    functools.singledispatchmethod: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
}
_FIXED_INSIDE = (*BOUND, *AROUND_FUNCTIONS)


class _Missing:
    """Marks a name that has no value now."""


MISSING: Any = _Missing()


def around_function(value: Any) -> tuple[str, ...]:
    """The attributes of what stands around a function, such as a static method, that hold this and its arguments."""
    return next((names for kind, names in AROUND_FUNCTIONS.items() if isinstance(value, kind)), ())


def is_empty(value: Any) -> bool:
    """Return whether a place has no value yet: it is missing, None, or a container without items."""
    return value is None or value is MISSING or (isinstance(value, (list, tuple, dict, set, deque)) and not value)


class Spot:
    """A place, found in a process: what is there can be read and set."""

    def get(self) -> Any:
        raise NotImplementedError

    def set(self, value: Any) -> None:
        raise NotImplementedError


class DictSpot(Spot):
    """A name of a module, or an item of a dictionary or list."""

    def __init__(self, names: Any, name: Any) -> None:
        self._names, self._name = names, name

    def get(self) -> Any:
        try:
            return self._names[self._name]
        except (LookupError, TypeError):
            return MISSING

    def set(self, value: Any) -> None:
        if value is not MISSING:
            self._names[self._name] = value
        elif isinstance(self._names, dict):
            self._names.pop(self._name, None)


class AttributeSpot(Spot):
    """An attribute, read and set without the object's own methods."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def get(self) -> Any:
        owner, name = self._owner, self._name
        if name == "__class__":
            return type(owner)
        if isinstance(owner, _FIXED_INSIDE) or (name == "default_factory" and isinstance(owner, defaultdict)):
            return getattr(owner, name, MISSING)
        if (hooks := hook_table(owner, name)) is not None:
            return hooks
        own = getattr(owner, "__dict__", None)
        if own is not None and name in own:
            return own[name]
        if isinstance(owner, type):
            with contextlib.suppress(Exception):  # a metaclass may answer with any
                return getattr(owner, name)
            return MISSING
        if isinstance(owner, nn.Module):
            for table in (buffers_in(owner), parameters_in(owner), modules_in(owner)):
                if name in table:
                    return table[name]
        found = attributes_of(owner).get(name, MISSING)
        if found is MISSING:
            found = inspect.getattr_static(type(owner), name, MISSING)
            return MISSING if hasattr(type(found), "__get__") else found
        return found

    def set(self, value: Any) -> None:
        owner, name = self._owner, self._name
        if isinstance(owner, _FIXED_INSIDE):
            return  # it was changed in place
        if isinstance(owner, type) and value is MISSING:
            if name in vars(owner):
                delattr(owner, name)
        elif isinstance(owner, type) or (isinstance(owner, nn.Module) and value is not MISSING):
            setattr(owner, name, value)
        elif value is MISSING and name in getattr(owner, "__dict__", {}):
            del owner.__dict__[name]
        elif value is MISSING:  # of a slot
            with contextlib.suppress(AttributeError):
                object.__delattr__(owner, name)
        else:
            set_attribute(owner, name, value)


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute without the object's own method, or with it where its class takes no other (a thread local)."""
    try:
        object.__setattr__(owner, name, value)
    except TypeError:
        setattr(owner, name, value)


class CellSpot(Spot):
    """A variable of a closure."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def get(self) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return MISSING

    def set(self, value: Any) -> None:
        if value is not MISSING:
            self._cell.cell_contents = value
        elif self.get() is not MISSING:
            del self._cell.cell_contents


class DefaultSpot(Spot):
    """A default of a function's parameter."""

    def __init__(self, function: types.FunctionType, name: str) -> None:
        self._function, self._name = function, name

    def get(self) -> Any:
        return defaults_of(self._function).get(self._name, MISSING)

    def set(self, value: Any) -> None:
        function, all_of_them = self._function, {**defaults_of(self._function), self._name: value}
        if function.__kwdefaults__ and self._name in function.__kwdefaults__:
            function.__kwdefaults__[self._name] = value
        elif function.__defaults__:
            count = function.__code__.co_argcount
            names = function.__code__.co_varnames[count - len(function.__defaults__) : count]
            function.__defaults__ = tuple(all_of_them[name] for name in names)


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """The defaults of a function's parameters."""
    values = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return {**dict(zip(names[len(names) - len(values) :], values, strict=True)), **(function.__kwdefaults__ or {})}


class FixedSpot(Spot):
    """An object whose contents alone can change: what was declared or handed over."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self) -> Any:
        return self._value

    def set(self, value: Any) -> None:
        """Nothing: it was changed in place."""


class FunctionSpot(Spot):
    """A value that one function reads and another one sets."""

    def __init__(self, read: Callable[[], Any], change: Callable[[Any], object]) -> None:
        self._read, self._change = read, change

    def get(self) -> Any:
        return self._read()

    def set(self, value: Any) -> None:
        if value is not MISSING:
            self._change(value)
