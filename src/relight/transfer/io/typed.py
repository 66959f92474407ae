"""Values of a tree that are more than their members: named tuples, counters, data classes, dates, members of enums.

Each is written down with the name of its class, which the process that reads it must have already, and of which no
code is run there.
"""

import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from relight.errors import UsageError
from relight.transfer.io.constants import callable_of, is_constant_type, name_of_callable, read_constant, write_constant

Write = Callable[[Any, str], Any]  # (member, its path) -> the node of that member
Node = dict[str, Any]
_BASES: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
_EXACT = (dict, list, tuple, set)  # of these classes themselves, members are all


def write_typed(value: Any, path: str, write: Write) -> tuple[str, Node] | None:
    """Return kind and node of a value whose class matters, None for any other. Raises UsageError, with the path."""
    kind = type(value)
    if is_constant_type(kind):
        if issubclass(kind, enum.Enum):
            _name_of(kind, path)  # or a process that reads it does not find it
        written = write_constant(value)
        return None if written is None else ("constant", {"c": written[0], "v": write(written[1], path)})
    if dataclasses.is_dataclass(kind) and not issubclass(kind, _BASES):
        pairs = [[name, write(one, f"{path}.{name}")] for name, one in attributes_of(value).items()]
        return "dataclass", {"c": _name_of(kind, path), "v": pairs}
    base: Any = next((one for one in _BASES if issubclass(kind, one)), None)
    if base is None or kind in _EXACT:
        return None
    node: Node = {"c": _name_of(kind, path)}
    if base is dict:
        node["v"] = [[write(key, path), write(one, f"{path}.{key}")] for key, one in dict.items(value)]
        if (factory := value.default_factory if isinstance(value, defaultdict) else None) is not None:
            if (name := name_of_callable(factory)) is None:
                raise UsageError(f"{path} is a defaultdict whose function has no name: use a class or a named function")
            node["f"] = name
    else:
        members = sorted(value, key=repr) if base in (set, frozenset) else base.__iter__(value)
        node["v"] = [write(one, f"{path}[{index}]") for index, one in enumerate(members)]
        if base is deque:
            node["n"] = value.maxlen
    if (own := getattr(value, "__dict__", None)) and own is not value:
        node["a"] = write(dict(own), path)
    return "typed", node


def read_typed(tag: str, node: Node, read: Callable[[Any], Any]) -> Any:
    """Return the value that `write_typed` has written down. Raises UsageError for a class that is unknown here."""
    if tag == "constant":
        try:
            return read_constant(node["c"], read(node["v"]))
        except LookupError:
            raise _unknown(node["c"]) from None
    kind: Any = _class_of(node["c"])
    if tag == "dataclass":
        made: Any = object.__new__(kind)
        for name, one in node["v"]:
            object.__setattr__(made, name, read(one))
        return made
    made = _read_container(kind, node, read)
    if "a" in node:
        vars(made).update(read(node["a"]))
    return made


def _read_container(kind: Any, node: Node, read: Callable[[Any], Any]) -> Any:
    if issubclass(kind, dict):
        factory = callable_of(node["f"]) if "f" in node else None
        return filled(kind, [(read(key), read(one)) for key, one in node["v"]], factory=factory)
    return filled(kind, [read(one) for one in node["v"]], size=node.get("n"))


def filled(kind: Any, members: list[Any], *, size: int | None = None, factory: Any = None) -> Any:
    """Return a container of this class that holds these members, without running any code of its own.

    Args:
        members: of a dict, its keys and values.
        size: `maxlen` of a deque.
        factory: `default_factory` of a defaultdict.
    """
    if issubclass(kind, tuple):
        is_of_torch = hasattr(kind, "n_sequence_fields")  # torch.return_types, and others made in C
        return kind(members) if is_of_torch else tuple.__new__(kind, members)
    if issubclass(kind, frozenset):
        return frozenset.__new__(kind, members)
    made = kind.__new__(kind)
    if issubclass(kind, dict):
        if factory is not None:
            made.default_factory = factory
        put = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
        for key, one in members:
            put(made, key, one)
    elif issubclass(kind, deque):
        deque.__init__(made, members, size)
    elif issubclass(kind, set):
        set.update(made, members)
    else:
        list.extend(made, members)
    return made


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds in its `__dict__`, and one of a data class in slots."""
    found = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                found[field.name] = getattr(value, field.name)
    return found


def _name_of(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if callable_of(name) is not kind:
        raise UsageError(
            f"{path} is of the class {kind.__qualname__}, which another process cannot find by its name: "
            "define it at the top of a module"
        )
    return name


def _class_of(name: str) -> Any:
    found = callable_of(name)
    if not isinstance(found, type) or not (dataclasses.is_dataclass(found) or issubclass(found, _BASES)):
        raise _unknown(name)
    return found


def _unknown(name: str) -> UsageError:
    return UsageError(f"{name} is in a state that was copied here, and this process does not have that class")
