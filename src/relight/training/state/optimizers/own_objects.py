"""Objects of a script's own classes in an optimizer's state (GaLore's projectors), as plain values, and back.

An object is its class, found by name in another process, and its attributes. One that several places share is one
object again where the tree is read. Functions and classes are found by name too. Modules, optimizers, files and other
objects of C are none of these.
"""

from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from relight.errors import UsageError
from relight.transfer.io.constants import callable_of, is_constant_type, name_of_callable

_CLASS, _SAME, _TORCH, _FUNCTION = "\x01class", "\x01same", "\x01torch", "\x01function"  # dict keys no user writes
ATTRIBUTES = "attributes"


class _Plain:
    """An object without memory beside its attributes."""


def is_own(value: Any) -> bool:
    """Return whether all that a value holds are attributes that Python code has given it."""
    kind = type(value)
    return (
        kind.__basicsize__ == _Plain.__basicsize__
        and not kind.__itemsize__
        and kind.__module__ != "builtins"
        and hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, Optimizer, type, torch.Tensor))
        and not is_constant_type(kind)
    )


class ObjectWriter:
    """Writes objects in a tree as dicts of plain values and tensors; the tensors are the live ones."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # an id may not be used again meanwhile

    def write(self, value: Any, path: str) -> Any:
        """Return the tree. Raises UsageError that names the path of an object whose class cannot be found by name."""
        if isinstance(value, dict):
            written = {key: self.write(one, f"{path}.{key}") for key, one in value.items()}
            is_usual = type(value) is dict or any(written[key] is not one for key, one in value.items())
            return written if is_usual else value  # a Counter stays one
        if type(value) in (list, tuple):
            return type(value)(self.write(one, f"{path}[{index}]") for index, one in enumerate(value))
        if isinstance(value, (torch.dtype, torch.device)):
            return {_TORCH: str(value)}
        if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
            return {_FUNCTION: _name_of(value, path)}
        if not is_own(value):
            return value
        if (number := self._numbers.get(id(value))) is not None:
            return {_SAME: number}
        self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        return {_CLASS: _name_of(type(value), path), ATTRIBUTES: self.write(dict(vars(value)), path)}


class ObjectReader:
    """Reads what one `ObjectWriter` wrote, in the same order."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where tensors of objects are, for which there is none yet."""
        self._device = device
        self._made: list[Any] = []

    def read(self, tree: Any, own: Any = None) -> Any:
        """Return the value of a tree; `own`, which is in its place here, if it is an object of the same class."""
        if type(tree) in (list, tuple):
            mine = own if type(own) is type(tree) and len(own) == len(tree) else [None] * len(tree)
            return type(tree)(self.read(one, other) for one, other in zip(tree, mine, strict=True))
        if type(tree) is not dict:
            return tree
        if _SAME in tree:
            return self._made[tree[_SAME]]
        if _TORCH in tree:
            return _torch_value(tree[_TORCH])
        if _FUNCTION in tree:
            return _found(tree[_FUNCTION])
        if _CLASS not in tree:
            mine = own if isinstance(own, dict) else {}
            return {key: self.read(one, mine.get(key)) for key, one in tree.items()}
        kind: Any = _found(tree[_CLASS])
        made = own if type(own) is kind and not any(own is one for one in self._made) else object.__new__(kind)
        self._made.append(made)
        mine, values = dict(vars(made)), tree[ATTRIBUTES]
        vars(made).clear()
        vars(made).update({key: self._attribute(one, mine.get(key)) for key, one in values.items()})
        return made

    def _attribute(self, tree: Any, own: Any) -> Any:
        if not isinstance(tree, torch.Tensor):
            return self.read(tree, own)
        if isinstance(own, torch.Tensor) and own.shape == tree.shape and own.dtype == tree.dtype:
            if own.data_ptr() != tree.data_ptr():
                own.detach().copy_(tree)
            return own
        return tree.to(self._device) if tree.ndim else tree


def _name_of(value: Any, path: str) -> str:
    if (name := name_of_callable(value)) is not None:
        return name
    what = "class" if isinstance(value, type) else "function"
    raise UsageError(
        f"{path} is a {value.__module__}.{value.__qualname__}, a {what} that another process does not find by this "
        "name: define it at the top of a module, so that a replacement has it too"
    )


def _found(name: str) -> Any:
    found = callable_of(name)
    if found is None:
        raise UsageError(f"the optimizer's state holds {name}, which this process does not have")
    return found


def _torch_value(name: str) -> Any:
    kind = getattr(torch, name.removeprefix("torch."), None) if name.startswith("torch.") else None
    return kind if isinstance(kind, torch.dtype) else torch.device(name)
