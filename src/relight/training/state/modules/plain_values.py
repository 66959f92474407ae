"""Plain values that a rank can keep for its successor: what they are, how large, and how to put one in place."""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from relight.training.state.values.copies import rebuilt
from relight.training.state.values.kinds import (
    attributes_beside,
    attributes_of,
    base_of,
    factory_of,
    is_found_by_name,
    items_of,
    kind_of,
    members_in,
    refill,
)
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.tensors import is_plain_memory
from relight.transfer.io.constants import name_of_callable, write_constant

MOST_BYTES = 16 * 2**20  # of one value that is kept beside the position page in every step
EXCERPT_BYTES = 2**16  # of a container that is compared in a job's first steps
_DEEPEST = 64  # containers, one in another
_DEQUE = "\x01deque"
_LEAF = "\x01leaf"  # that requires a gradient
_EXACT = (list, dict, set, frozenset, tuple, collections.deque)
_MUTABLE = ("list", "deque", "dict", "set", "tensor", "array", "object")


def plain_bytes(value: Any, most: int = MOST_BYTES, *, in_graphs: bool = False, depth: int = 0) -> int | None:
    """About how many bytes a value takes; None if it is no plain value, or takes more than `most`.

    Plain are numbers, strings, None, constants of Python and torch (dates, members of enumerations, dtypes), tensors
    outside of any graph, NumPy arrays, and containers and data classes of these whose class another process finds by
    its name. With `in_graphs` also the values of tensors in a graph, which `pack` takes without it.
    """
    kind = kind_of(value)
    if kind in ("plain", "number", "array"):
        size = _bytes_of_leaf(kind, value)
        return None if size is None or size > most else size
    if kind == "tensor":
        in_graph = value.requires_grad or value.grad_fn is not None
        is_kept = (in_graphs or not in_graph) and not value.is_meta and _has_bytes(value) and value.nbytes + 16 <= most
        return value.nbytes + 16 if is_kept else None
    members = _members_of(kind, value) if depth < _DEEPEST else None
    if members is None:
        return None
    size = 16
    for member in members:
        part = plain_bytes(member, most - size, in_graphs=in_graphs, depth=depth + 1)
        if part is None:
            return None
        size += part
    return size if size <= most else None


def is_too_large(value: Any) -> bool:
    """Return whether a value would be plain if it took less memory."""
    return plain_bytes(value, in_graphs=True) is None and plain_bytes(value, 2**62, in_graphs=True) is not None


def _bytes_of_leaf(kind: str, value: Any) -> int | None:
    if kind == "plain":
        if isinstance(value, (str, bytes)):
            return 8 + len(value)
        if value is None or type(value) in (bool, int, float):
            return 8
        written = write_constant(value)
        return 64 if written is not None and (":" not in written[0] or is_found_by_name(type(value))) else None
    is_usual = kind == "number" or type(value).__name__ == "ndarray"
    return int(value.nbytes) + 16 if is_usual and value.dtype.itemsize and not value.dtype.hasobject else None


def _members_of(kind: str, value: Any) -> Iterable[Any] | None:
    """Return the members of a container or data class; None: no plain value is one of this class, or has such keys."""
    its_class: Any = type(value)
    if kind not in ("list", "deque", "dict", "set", "tuple", "object"):
        return None
    if kind == "object":
        is_plain = dataclasses.is_dataclass(its_class) and is_found_by_name(its_class)
        return attributes_of(value).values() if is_plain else None
    if its_class not in _EXACT and not is_found_by_name(its_class):
        return None
    members = list(members_in(kind, value))
    keys: Iterable[Any] = ()
    if kind == "dict":
        keys = base_of(value).keys(value)
        if (factory := factory_of(value)) is not None and name_of_callable(factory) is None:
            return None
    elif kind == "set":
        keys = members
    if not all(map(_is_plain_key, keys)):
        return None
    return [*members, *keys, *attributes_beside(value).values()]


def _is_plain_key(key: Any) -> bool:
    """Return whether a key is equal to itself in another process: tensors and objects are by their identity."""
    kind = kind_of(key)
    return kind in ("plain", "number") or (kind == "tuple" and all(map(_is_plain_key, key)))


def _has_bytes(tensor: torch.Tensor) -> bool:
    return is_plain_memory(tensor) or is_distributed(tensor)


def is_mutable(value: Any) -> bool:
    """Return whether a value can change without being assigned: by itself, or in a tuple's member."""
    kind = kind_of(value)
    return kind in _MUTABLE or (kind == "tuple" and any(map(is_mutable, members_in(kind, value))))


def pack(value: Any) -> Any:
    """A plain value as a tree that `relight.transfer.io.codec` takes; tensors are copied."""
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return {_LEAF: copy} if value.requires_grad and value.is_leaf else copy
    if type(value) is collections.deque:
        return {_DEQUE: [pack(member) for member in value], "maxlen": value.maxlen}
    return rebuilt(value, pack)


def unpack(tree: Any) -> Any:
    """The inverse of `pack`."""
    if type(tree) is dict:
        if _LEAF in tree:
            return tree[_LEAF].requires_grad_()
        if _DEQUE in tree:
            return collections.deque((unpack(member) for member in tree[_DEQUE]), tree["maxlen"])
    return rebuilt(tree, unpack)


def put_in_place(mine: Any, value: Any, shared: Callable[[torch.Tensor], bool] = lambda _: False) -> Any:
    """`value`, in place of `mine` where that object can take it, since others may hold it too.

    `shared` says which tensors among the members of `mine` are views of state that is put back elsewhere: they stay.
    """
    if mine is value:
        return mine
    if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor):
        in_graph = mine.requires_grad or value.requires_grad
        if mine.shape == value.shape and mine.dtype == value.dtype and not in_graph:
            with torch.no_grad():
                mine.copy_(value)
            return mine
        return value
    value = _with_views(mine, value, shared)
    if type(mine) is not type(value):
        return value
    kind = kind_of(mine)
    if kind == "list":
        list.__setitem__(mine, slice(None), value)
    elif kind == "dict":
        refill(mine, list(items_of(value)))
    elif kind == "object":
        _set_attributes(mine, value)
        return mine
    elif (kind == "set" and type(mine) is not frozenset) or (kind == "deque" and mine.maxlen == value.maxlen):
        base, kept = base_of(mine), list(members_in(kind, value))
        base.clear(mine)
        (base.extend if kind == "deque" else base.update)(mine, kept)
    elif kind == "array" and mine.ndim and mine.shape == value.shape and mine.dtype == value.dtype:
        mine[...] = value
        return mine
    else:
        return value
    if own := attributes_beside(mine):
        own.clear()
    if beside := attributes_beside(value):
        vars(mine).update(beside)
    return mine


def _set_attributes(mine: Any, value: Any) -> None:
    """Give an object the attributes of another one of its class."""
    attributes = attributes_of(value)
    for name in attributes_of(mine).keys() - attributes.keys():
        object.__delattr__(mine, name)
    for name, one in attributes.items():
        object.__setattr__(mine, name, one)


def _with_views(mine: Any, value: Any, shared: Callable[[torch.Tensor], bool]) -> Any:
    """`value`, with the members of `mine` in it that `shared` says are views of other state."""
    if isinstance(mine, torch.Tensor):
        same = isinstance(value, torch.Tensor) and mine.shape == value.shape and mine.dtype == value.dtype
        return mine if same and shared(mine) else value
    if type(mine) is not type(value):
        return value
    kind = kind_of(mine)
    if kind == "dict":
        own = dict(items_of(mine))
        places = iter(list(items_of(value)))
        return rebuilt(value, lambda one: _with_views(own.get(next(places, ("",))[0]), one, shared))
    if kind in ("list", "tuple") and len(mine) == len(value):
        members = iter(members_in(kind, mine))
        return rebuilt(value, lambda one: _with_views(next(members, None), one, shared))
    return value
