"""Every torch function that a step calls, with digests of what it was given and what came of it (`relight prove`)."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from relight.script_files import is_script_file
from relight.training.torch_private.tensors import tree_leaves
from relight.training.worker.step import writes
from relight.wire.records.evidence import Operation

_WRITES = writes.__file__
_MAX_OPERATIONS = 100_000
# Their result, or what is filled in place, holds whatever memory held.
_UNSET = ("empty", "new_empty", "empty_like", "empty_strided", "resize_")
_ADDRESSES = ("data_ptr", "storage", "untyped_storage", "storage_offset", "__hash__", "__repr__", "__format__")
_FILLS = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "trunc_normal_")


class OperationTrace(TorchFunctionMode):
    """Use it as a context, on the main thread. `operations` are those of the newest attempt."""

    def __init__(self, digest: Callable[[torch.Tensor], str], home: str) -> None:
        super().__init__()
        self._digest = digest
        self._home = home
        self.operations: list[Operation] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        short = name.rpartition(".")[2]
        if short in ("__get__", *_ADDRESSES) or len(self.operations) >= _MAX_OPERATIONS:
            return func(*args, **kwargs)
        place = self._place()
        fills = short in _FILLS
        given = tuple(map(self._shown, tree_leaves((args[1:] if fills else args, kwargs))))
        result = func(*args, **kwargs)
        if place:
            unset = short in _UNSET
            shown = "" if unset else " ".join(self._shown(leaf) for leaf in tree_leaves(result))
            self.operations.append(Operation(place=place, name=name, given=given, result=shown))
        return result

    def _shown(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._digest(value)
        if isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype, torch.device)):
            return repr(value)[:40]
        return type(value).__name__

    def _place(self) -> str:
        """The innermost line of the script, or of what it calls; empty of what relight itself does."""
        frame = sys._getframe(2)
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(self._home) and path != _WRITES:  # that one calls what the script calls
                return ""
            if is_script_file(path):
                return f"{os.path.basename(path)}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""


def _name_of(func: Any) -> str:
    name = resolve_name(func) or getattr(func, "__name__", "")
    return str(name).removeprefix("torch.")
