"""Tensors: version counters, and the attributes that other code may set."""

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

# Return how often a tensor was written in place; raise RuntimeError for one made in inference mode, which has no count.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")

# Descriptors of C++ that `torch.Tensor` inherits; a property of the same name on `torch.Tensor` comes before them.
DATA: Any = vars(torch._C.TensorBase)["data"]
REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad"]
SET_REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad_"]

# Copy tensors into others of the same shapes, in one call: `copy_all(into, tensors)`.
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_

_STAY = {"requires_grad_", "detach_", "share_memory_", "__index__", "__init__", "__int__", "__invert__", "__iter__"}
_ENDS = re.compile(r"[^_].*[^_]_|__i[a-z]+__|__setitem__")
# Methods of a tensor that write into it, by name.
WRITING: dict[str, Callable[..., Any]] = {
    name: getattr(torch.Tensor, name) for name in dir(torch.Tensor) if _ENDS.fullmatch(name) and name not in _STAY
}


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples, and of containers that torch knows."""
    return torch.utils._pytree.tree_leaves(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with each leaf replaced by what `function` makes of it."""
    return torch.utils._pytree.tree_map(function, tree)


def print_options() -> dict[str, Any]:
    """Return how tensors are printed, as `torch.set_printoptions` takes it."""
    return dict(vars(torch._tensor_str.PRINT_OPTS))


def set_print_options(values: dict[str, Any]) -> None:
    torch.set_printoptions(**values)


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """True if its values are elements of one memory of its own: not sparse, nested, quantized, or made of others."""
    return tensor.layout is torch.strided and not (
        tensor.is_nested or tensor.is_quantized or stands_for_others(type(tensor))
    )


@functools.cache
def stands_for_others(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a subclass may hold their values in other tensors, and dispatch to these."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def components_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that hold a tensor's values: of sparse, nested and quantized ones, and of subclasses.

    A strided tensor is its own only component.
    """
    if hasattr(tensor, "__tensor_flatten__"):  # of NestedTensor, DTensor, and subclasses of the user's
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]  # a mesh among them, perhaps
        return [part for one in inner if isinstance(one, torch.Tensor) for part in components_of(one.detach())]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        held = [each for each in vars(tensor).values() if isinstance(each, torch.Tensor)]
        return [part for each in (*held, *_own_memory(tensor)) for part in components_of(each)]
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in components_of(each)]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout != torch.strided:  # of another backend
        return [tensor.to_dense()]
    return [tensor.int_repr()] if tensor.is_quantized else [tensor]


def _own_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the values of a subclass's own memory, as a plain tensor; nothing if it stands for other tensors."""
    if stands_for_others(type(tensor)):
        return []
    with torch._C.DisableTorchFunctionSubclass():
        return [tensor.as_subclass(torch.Tensor)]
