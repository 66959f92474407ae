"""Results of collectives on a detached group, where this process is alone: its own values.

| operation | result |
|---|---|
| broadcast, all_reduce, reduce, and their coalesced forms | the tensor as it is; nothing is added up |
| all_gather, gather (on the rank that gathers), in every form | this process's tensor, in each rank's place |
| reduce_scatter, in every form | this rank's part of its own input |
| scatter | this rank's part where it is the source, elsewhere zeros |
| all_to_all, in every form | what was sent to a rank comes back from it; zeros where sizes differ |
| recv | zeros, said to come from the next rank if any would do |
| send, barrier | nothing |

Nothing that is returned is what happened to lie in memory: a script may take it for a size.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from relight.training.torch_private.distributed.groups import REDUCE_SCATTERS, TENSOR_ALL_GATHERS


def complete(operation: str, rank: int, size: int, arguments: Sequence[Any]) -> None:
    """Give the outputs among the arguments of a process group's operation the values of this process, alone."""
    with torch.no_grad():
        _GIVEN[operation](rank, size, *arguments)


def _unchanged(*_: Any) -> None:
    pass


def _gather_lists(_: int, __: int, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *___: Any) -> None:
    for places, own in zip(outputs, inputs, strict=False):  # of `gather`, no outputs where another rank gathers
        for place in places:
            place.copy_(own)


def _gather_coalesced(
    _: int, __: int, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], *___: Any
) -> None:
    for places in outputs:
        for place, own in zip(places, inputs, strict=True):
            place.copy_(own)


def _gather_tensors(_: int, size: int, outputs: Any, inputs: Any, *__: Any) -> None:
    for output, own in _pairs(outputs, inputs):
        for place in output.reshape(-1).chunk(size) if own.numel() else ():
            place.copy_(own.reshape(-1))


def _gather_tensor(rank: int, size: int, output: Tensor, own: Tensor, options: Any = None, *_: Any) -> None:
    if options is None or options.rootRank == rank:
        _gather_tensors(rank, size, output, own)


def _reduce_scatter_lists(
    rank: int, _: int, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *__: Any
) -> None:
    for output, parts in zip(outputs, inputs, strict=True):
        output.copy_(parts[rank])


def _reduce_scatter_tensors(rank: int, _: int, outputs: Any, inputs: Any, *__: Any) -> None:
    for output, whole in _pairs(outputs, inputs):
        first = rank * output.numel()
        output.copy_(whole.reshape(-1)[first : first + output.numel()].view_as(output))


def _scatter(rank: int, _: int, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], *__: Any) -> None:
    for index, output in enumerate(outputs):
        output.copy_(inputs[index][rank]) if index < len(inputs) else output.zero_()


def _exchange_lists(_: int, __: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *___: Any) -> None:
    for output, sent in zip(outputs, inputs, strict=True):
        _give_back(output, sent)


def _exchange_tensors(
    _: int,
    size: int,
    output: Tensor,
    sent: Tensor,
    output_sizes: Sequence[int] = (),
    sizes: Sequence[int] = (),
    *__: Any,
) -> None:
    outputs, inputs = _split(output, output_sizes, size), _split(sent, sizes, size)
    for received, part in zip(outputs, inputs, strict=True):
        _give_back(received, part)


def _receive(_: int, __: int, tensors: Iterable[Tensor], *___: Any) -> None:
    for tensor in tensors:
        tensor.zero_()


def _pairs(outputs: Any, inputs: Any) -> Iterable[tuple[Tensor, Tensor]]:
    return [(outputs, inputs)] if isinstance(outputs, Tensor) else zip(outputs, inputs, strict=True)


def _split(tensor: Tensor, sizes: Sequence[int], ranks: int) -> Sequence[Tensor]:
    """Along the first dimension, evenly without sizes."""
    parts: Sequence[Tensor] = torch.split(tensor, list(sizes) or [tensor.shape[0] // ranks] * ranks)
    return parts


def _give_back(output: Tensor, sent: Tensor) -> None:
    output.copy_(sent.reshape(output.shape)) if output.numel() == sent.numel() else output.zero_()


_GIVEN: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "barrier"), _unchanged),
    **dict.fromkeys(("recv", "recv_anysource"), _receive),
    **dict.fromkeys(("allgather", "gather"), _gather_lists),
    "allgather_coalesced": _gather_coalesced,
    **dict.fromkeys(TENSOR_ALL_GATHERS, _gather_tensors),
    **dict.fromkeys(("gather_into_tensor", "gather_single"), _gather_tensor),
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter_lists,
    **dict.fromkeys(REDUCE_SCATTERS, _reduce_scatter_tensors),
    "alltoall": _exchange_lists,
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), _exchange_tensors),
}
