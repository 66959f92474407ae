"""Notices when a script reaches for `Tensor.data`: what is changed through it shows in no version counter.

`p.data.mul_(0.99)` and `p.data = q` are common in published scripts (momentum encoders, pruning, averaged models), and
autograd keeps no count of them. So while a loop of steps runs, `torch.Tensor.data` is a property that remembers which
of the watched tensors were reached for. A tensor that was only read looks the same: the bits tell whether it changed.
"""

from collections.abc import Iterable
from typing import Any

import torch

from relight.training.torch_private import not_compiled

_DATA: Any = vars(torch._C.TensorBase)["data"]


class DataAccess:
    """Which of the watched tensors were reached for through `.data` since the last `clear`."""

    def __init__(self) -> None:
        self.reached: set[int] = set()  # by `id`
        self._watched: set[int] = set()

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on watch these, instead of those before. They must be kept alive by the caller."""
        self._watched = {id(tensor) for tensor in tensors}

    def clear(self) -> None:
        self.reached.clear()

    def install(self) -> None:
        watched_of, reached = self, self.reached

        @not_compiled
        def get(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in watched_of._watched:
                reached.add(id(tensor))
            data: torch.Tensor = _DATA.__get__(tensor)
            return data

        @not_compiled
        def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
            if id(tensor) in watched_of._watched:
                reached.add(id(tensor))
            _DATA.__set__(tensor, value)

        torch.Tensor.data = property(get, put)  # type: ignore[assignment]

    def remove(self) -> None:
        """Leave `torch.Tensor` as it was."""
        if "data" in vars(torch.Tensor):
            del torch.Tensor.data
