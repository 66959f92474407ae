"""Equality of tensors bit by bit: NaNs of one pattern are equal, and a zero is not the other zero."""

import torch

from relight.training.torch_private.tensors import is_plain_memory
from relight.transfer.io.codec import local_part, tensor_digests

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits; of divided ones, this rank's parts."""
    left, right = local_part(left), local_part(right)
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    integers = _INTEGERS.get(left.element_size())
    if integers is None or not (is_plain_memory(left) and is_plain_memory(right)) or left.is_conj() or right.is_conj():
        return tensor_digests(left) == tensor_digests(right)
    return torch.equal(left.detach().view(integers), right.detach().view(integers))
