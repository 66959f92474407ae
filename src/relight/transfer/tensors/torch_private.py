"""Private interfaces of torch that weights need."""

from typing import Any

import torch

COMPILED = "_orig_mod"  # the attribute under which a compiled module keeps the module itself
_DATA: Any = vars(torch._C.TensorBase)["data"]  # not Tensor.data, which a training may watch


def set_memory(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Give a tensor the memory of another one, of the same type and shape."""
    _DATA.__set__(tensor, other)


def users_of_storage(tensor: torch.Tensor) -> int:
    """Return how many tensors and other holders use the storage of a tensor, itself counted."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # and not `storage`
