"""Tensors: version counters, and the attributes that other code may set."""

import operator
from collections.abc import Callable
from typing import Any

import torch

# Return how often a tensor was written in place; raise RuntimeError for one made in inference mode, which has no count.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")

# Descriptors of C++ that `torch.Tensor` inherits; a property of the same name on `torch.Tensor` comes before them.
DATA: Any = vars(torch._C.TensorBase)["data"]
REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad"]
SET_REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad_"]


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested dicts, lists and tuples, and of containers that torch knows."""
    return torch.utils._pytree.tree_leaves(tree)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with each leaf replaced by what `function` makes of it."""
    return torch.utils._pytree.tree_map(function, tree)
