"""Plain values that a rank can keep for its successor: what they are, how large, and how to put one back."""

import collections
from collections.abc import Callable
from typing import Any

import torch

from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.tensors import is_plain_memory

MOST_BYTES = 2**20  # of one value that is kept beside the position page in every step
EXCERPT_BYTES = 2**16  # of a container that is compared in a job's first steps
_DEQUE = "\x01deque"
_LEAF = "\x01leaf"  # that requires a gradient
_SCALARS = (type(None), bool, int, float, complex, str, bytes)


def plain_bytes(value: Any, most: int = MOST_BYTES, *, in_graphs: bool = False) -> int | None:
    """About how many bytes a value takes; None if it is no plain value, or takes more than `most`.

    Plain are numbers, strings, None, tensors outside of any graph, NumPy arrays, and containers of these. With
    `in_graphs` also the values of tensors in a graph, which `pack` takes without it.
    """
    if isinstance(value, _SCALARS):
        return None if isinstance(value, complex) else 8 + (len(value) if isinstance(value, (str, bytes)) else 0)
    size = 16
    if isinstance(value, torch.Tensor):
        in_graph = value.requires_grad or value.grad_fn is not None
        if (in_graph and not in_graphs) or value.is_meta or not _has_bytes(value):
            return None
        size += value.nbytes
    elif isinstance(value, (list, set, frozenset, collections.deque)) or type(value) is tuple:
        for member in value:
            part = plain_bytes(member, most - size, in_graphs=in_graphs)
            if part is None:
                return None
            size += part
    elif isinstance(value, dict):
        for key, member in value.items():
            parts = [plain_bytes(one, most - size, in_graphs=in_graphs) for one in (key, member)]
            if parts[0] is None or parts[1] is None:
                return None
            size += parts[0] + parts[1]
    elif type(value).__module__ == "numpy" and getattr(value, "dtype", None) is not None:
        if value.dtype.kind not in "biufc":
            return None
        size += int(value.nbytes)
    else:
        return None
    return size if size <= most else None


def _has_bytes(tensor: torch.Tensor) -> bool:
    return is_plain_memory(tensor) or is_distributed(tensor)


def is_mutable(value: Any) -> bool:
    """Return whether a value can change without being assigned."""
    kinds = (list, dict, set, collections.deque, torch.Tensor)
    return isinstance(value, kinds) or (
        type(value).__module__ == "numpy" and hasattr(value, "shape") and value.ndim > 0
    )


def pack(value: Any) -> Any:
    """A plain value as a tree that `relight.transfer.io.codec` takes; tensors are copied."""
    if isinstance(value, collections.deque):
        return {_DEQUE: [pack(member) for member in value], "maxlen": value.maxlen}
    if isinstance(value, list):
        return [pack(member) for member in value]
    if type(value) is tuple:
        return tuple(pack(member) for member in value)
    if isinstance(value, dict):
        return {key: pack(member) for key, member in value.items()}
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return {_LEAF: copy} if value.requires_grad and value.is_leaf else copy
    return value


def unpack(tree: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(tree, dict):
        if _LEAF in tree:
            return tree[_LEAF].requires_grad_()
        if _DEQUE in tree:
            return collections.deque((unpack(member) for member in tree[_DEQUE]), tree["maxlen"])
        return {key: unpack(member) for key, member in tree.items()}
    if isinstance(tree, list):
        return [unpack(member) for member in tree]
    if type(tree) is tuple:
        return tuple(unpack(member) for member in tree)
    return tree


def put_back(mine: Any, value: Any, shared: Callable[[torch.Tensor], bool] = lambda _: False) -> Any:
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
    if isinstance(mine, list) and isinstance(value, list):
        mine[:] = value
        return mine
    if isinstance(mine, dict) and isinstance(value, dict):
        mine.clear()
        mine.update(value)
        return mine
    if isinstance(mine, set) and isinstance(value, (set, frozenset)):
        mine.clear()
        mine.update(value)
        return mine
    if isinstance(mine, collections.deque) and isinstance(value, collections.deque) and mine.maxlen == value.maxlen:
        mine.clear()
        mine.extend(value)
        return mine
    if type(mine).__module__ == "numpy" and getattr(mine, "shape", None) == getattr(value, "shape", 0):
        if getattr(mine, "ndim", 0):
            mine[...] = value
            return mine
        return value
    return value


def _with_views(mine: Any, value: Any, shared: Callable[[torch.Tensor], bool]) -> Any:
    """`value`, with the members of `mine` in it that `shared` says are views of other state."""
    if isinstance(mine, torch.Tensor):
        same = isinstance(value, torch.Tensor) and mine.shape == value.shape and mine.dtype == value.dtype
        return mine if same and shared(mine) else value
    if isinstance(mine, dict) and isinstance(value, dict):
        return {key: _with_views(mine.get(key), one, shared) for key, one in value.items()}
    if isinstance(mine, list) and isinstance(value, list) and len(mine) == len(value):
        return [_with_views(own, one, shared) for own, one in zip(mine, value, strict=True)]
    if type(mine) is type(value) is tuple and len(mine) == len(value):
        return tuple(_with_views(own, one, shared) for own, one in zip(mine, value, strict=True))
    return value
