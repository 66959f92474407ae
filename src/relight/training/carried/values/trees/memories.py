"""Memory that several carried tensors share, as a row of a bank does. It is shared again where it is read."""

from collections.abc import Iterable
from typing import Any

import torch

from relight.training.carried.values.parts import Parts, is_part
from relight.training.state.values.kinds import kind_of


class Memory:
    """A stretch of one storage, from the first to the last element that some tensor in it reaches."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number = number
        self.tensors = [tensor]

    @property
    def first(self) -> int:
        """Place in the storage, in elements."""
        return min(int(tensor.storage_offset()) for tensor in self.tensors)

    @property
    def length(self) -> int:
        """Length in elements."""
        return max(int(tensor.storage_offset()) + _extent(tensor) for tensor in self.tensors) - self.first

    @property
    def widest(self) -> torch.Tensor:
        """The tensor that reaches furthest."""
        return max(self.tensors, key=_extent)

    @property
    def is_covered(self) -> bool:
        """True if one contiguous tensor is all of it."""
        widest = self.widest
        return widest.is_contiguous() and (widest.storage_offset(), widest.numel()) == (self.first, self.length)

    def contents(self) -> torch.Tensor:
        """A copy, of one dimension."""
        return self.tensors[0].detach().as_strided((self.length,), (1,), self.first).clone()


class Memories:
    """The memory of all tensors that are to be written."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._found: dict[tuple[int, torch.dtype], Memory] = {}

    def add(self, blocks: Iterable[Any]) -> None:
        """Look at the tensors among these, less those that are parts of what was handed over."""
        for tensor in blocks:
            if kind_of(tensor) != "tensor":
                continue
            if tensor.layout is not torch.strided or tensor.numel() == 0 or type(tensor) is not torch.Tensor:
                continue
            key = tensor.untyped_storage().data_ptr(), tensor.dtype
            memory = self._found.get(key)
            if memory is None:
                if not is_part(self._parts, tensor):
                    self._found[key] = Memory(len(self._found), tensor)
            elif not any(tensor is one for one in memory.tensors):
                memory.tensors.append(tensor)

    def of(self, tensor: torch.Tensor) -> Memory | None:
        """The memory that a tensor shares with other tensors; None: it shares none."""
        if not self._found or tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
            return None
        memory = self._found.get((tensor.untyped_storage().data_ptr(), tensor.dtype))
        if memory is None or len(memory.tensors) == 1 or not any(tensor is one for one in memory.tensors):
            return None
        return memory


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
