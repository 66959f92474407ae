"""Values of the standard library and of torch that never change: written down as plain values, and made again."""

import datetime
import enum
import sys
import uuid
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch

_Write = Callable[[Any], Any]
_BUILTIN = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)}
_FORMS: dict[type, tuple[_Write, Callable[[Any], Any]]] = {
    complex: (lambda v: (v.real, v.imag), lambda v: complex(*v)),
    range: (lambda v: (v.start, v.stop, v.step), lambda v: range(*v)),
    slice: (lambda v: (v.start, v.stop, v.step), lambda v: slice(*v)),
    type(Ellipsis): (lambda _: None, lambda _: ...),
    type: (lambda v: v.__name__, lambda v: _BUILTIN[v]),
    torch.Size: (list, torch.Size),
    torch.device: (str, torch.device),
    torch.dtype: (lambda v: str(v).removeprefix("torch."), lambda v: getattr(torch, v)),
    Fraction: (lambda v: (v.numerator, v.denominator), lambda v: Fraction(*v)),
    Decimal: (str, Decimal),
    uuid.UUID: (str, uuid.UUID),
    PosixPath: (str, Path),
    PurePosixPath: (str, PurePosixPath),
    datetime.timedelta: (lambda v: (v.days, v.seconds, v.microseconds), lambda v: datetime.timedelta(*v)),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
}
_HOMES_OF_BUILTINS = ("torch", "torch.nn.functional", "math", "numpy")  # not all of these say where they are from
_BY_NAME = {kind.__name__: kind for kind in _FORMS}


def is_constant_type(kind: type) -> bool:
    """Return whether values of this class are among them."""
    return kind in _FORMS or issubclass(kind, enum.Enum)


def write_constant(value: Any) -> tuple[str, Any] | None:
    """Its kind and plain values. None: it cannot be written down."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        # Of flags, several at once or none have no name of their own.
        return f"{kind.__module__}:{kind.__qualname__}", value.name if value.name in kind.__members__ else value.value
    if kind is type and value not in _BUILTIN.values():
        return None
    return kind.__name__, _FORMS[kind][0](value)


def name_of_callable(value: Any) -> str | None:
    """MODULE:NAME under which every process has this very function or class. None: there is none."""
    name = getattr(value, "__qualname__", getattr(value, "__name__", None))
    if not isinstance(name, str) or not callable(value):
        return None
    for module in (getattr(value, "__module__", None), *_HOMES_OF_BUILTINS):
        text = f"{module}:{name.rpartition('.')[2] if module in _HOMES_OF_BUILTINS else name}"
        if isinstance(module, str) and callable_of(text) is value:
            return text
    return None


def callable_of(name: str) -> Any:
    """The inverse of `name_of_callable`; None: this process has none of this name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def read_constant(kind: str, written: Any) -> Any:
    """The inverse of `write_constant`. Raises LookupError for an enumeration that this process does not have."""
    if kind in _BY_NAME:
        return _FORMS[_BY_NAME[kind]][1](written)
    found = callable_of(kind)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise LookupError(kind)
    return found[written] if isinstance(written, str) else found(written)
