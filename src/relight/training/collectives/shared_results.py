"""Results of collectives that are the same on every rank: a replacement is given them, and calls no other rank."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from relight.training.torch_private.distributed.groups import TENSOR_ALL_GATHERS

# Operations of a process group whose first argument is what all ranks get; a barrier has no results.
_SHARED = frozenset(
    ("allreduce", "allreduce_coalesced", "broadcast", "allgather", "allgather_coalesced", *TENSOR_ALL_GATHERS)
)
_OTHER_WAY = (
    "the code between two epochs calls {found} in a replacement, where the other ranks have called {expected}: it must "
    "depend on nothing but the state, the data and what steps leave (not on a clock, or on files that appear)"
)


class SharedResult(NamedTuple):
    """The result of one collective."""

    operation: str
    tensors: list[torch.Tensor]


def outputs_of(operation: str, arguments: Sequence[Any]) -> list[torch.Tensor] | None:
    """Return the tensors that get the result of a collective of all ranks; None: ranks get different ones."""
    if operation == "barrier":
        return []
    return [*tensors_in(arguments[:1])] if operation in _SHARED else None


def tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Return tensors among arguments, also those in lists."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from tensors_in(one)


def give(result: SharedResult, operation: str, arguments: Sequence[Any]) -> None:
    """Give a collective the result that other ranks had. Raises RuntimeError if it is another collective."""
    outputs = outputs_of(operation, arguments) or []
    forms, expected = [_form(one) for one in outputs], [_form(one) for one in result.tensors]
    if operation != result.operation or forms != expected:
        names = _name(operation, forms), _name(result.operation, expected)
        raise RuntimeError(_OTHER_WAY.format(found=names[0], expected=names[1]))
    with torch.no_grad():
        for output, value in zip(outputs, result.tensors, strict=True):
            output.copy_(value)


def came_to_another(operation: str) -> RuntimeError:
    """Return the error for code that calls a collective after the last one of the other ranks."""
    return RuntimeError(_OTHER_WAY.format(found=operation, expected="no further collective"))


def came_to_fewer(results: Sequence[SharedResult]) -> RuntimeError:
    """Return the error for code that has ended without calling these collectives."""
    return RuntimeError(_OTHER_WAY.format(found="no further collective", expected=results[0].operation))


def _form(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _name(operation: str, forms: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return f"{operation} of {', '.join(f'{tuple(shape)} {dtype}' for shape, dtype in forms) or 'nothing'}"
