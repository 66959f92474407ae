"""Every collective on a detached group: it gives this process's own values, as `collectives.alone` says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from relight.training.collectives import alone
from relight.training.torch_private.distributed.groups import OPERATIONS
from tests.training.standby import BUILT_AS, Standby

SIZE = 4
DTYPES = (torch.int64, torch.uint8, torch.float32, torch.bfloat16, torch.complex64, torch.bool)
Result = tuple[list[Tensor], list[Tensor]]  # what came, and what should


def own(dtype: torch.dtype, number: int = 1) -> Tensor:
    """Two rows that no memory holds by chance."""
    return (
        (torch.arange(6).reshape(2, 3) % 2 == number % 2)
        if dtype is torch.bool
        else torch.full((2, 3), 40 + number, dtype=dtype)
    )


def room(dtype: torch.dtype, rows: int = 2) -> Tensor:
    """As `torch.empty`, with contents that would be noticed."""
    return torch.full((rows, 3), 1 if dtype is torch.bool else 99, dtype=dtype)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def parts(dtype: torch.dtype) -> list[Tensor]:
    """Another one for each rank."""
    return [own(dtype, number) for number in range(SIZE)]


def broadcast(dtype: torch.dtype, wait: Any) -> Result:
    tensor = own(dtype)
    wait(dist.broadcast, tensor, 0)
    return [tensor], [own(dtype)]


def all_reduce(dtype: torch.dtype, wait: Any) -> Result:
    tensor = own(dtype)
    wait(dist.all_reduce, tensor)
    return [tensor], [own(dtype)]


def reduce(dtype: torch.dtype, wait: Any) -> Result:
    tensor = own(dtype)
    wait(dist.reduce, tensor, BUILT_AS)
    return [tensor], [own(dtype)]


def all_gather(dtype: torch.dtype, wait: Any) -> Result:
    outputs = [room(dtype) for _ in range(SIZE)]
    wait(dist.all_gather, outputs, own(dtype))
    return outputs, [own(dtype)] * SIZE


def all_gather_into_tensor(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype, 2 * SIZE)
    wait(dist.all_gather_into_tensor, output, own(dtype))
    return [output], [torch.cat([own(dtype)] * SIZE)]


def all_gather_stacked(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype, 2 * SIZE).reshape(SIZE, 2, 3)
    wait(dist.all_gather_into_tensor, output, own(dtype))
    return [output], [torch.stack([own(dtype)] * SIZE)]


def all_gather_coalesced(dtype: torch.dtype, wait: Any) -> Result:
    outputs = [[room(dtype), room(dtype)] for _ in range(SIZE)]
    wait(dist.all_gather_coalesced, outputs, [own(dtype), own(dtype, 2)])
    return [tensor for pair in outputs for tensor in pair], [own(dtype), own(dtype, 2)] * SIZE


def gather_here(dtype: torch.dtype, wait: Any) -> Result:
    outputs = [room(dtype) for _ in range(SIZE)]
    wait(dist.gather, own(dtype), outputs, BUILT_AS)
    return outputs, [own(dtype)] * SIZE


def gather_elsewhere(dtype: torch.dtype, wait: Any) -> Result:
    tensor = own(dtype)
    wait(dist.gather, tensor, None, 0)
    return [tensor], [own(dtype)]


def scatter_from_here(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype)
    wait(dist.scatter, output, parts(dtype), BUILT_AS)
    return [output], [parts(dtype)[BUILT_AS]]


def scatter_from_elsewhere(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype)
    wait(dist.scatter, output, None, 0)
    return [output], [torch.zeros_like(output)]


def reduce_scatter(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype)
    wait(dist.reduce_scatter, output, parts(dtype))
    return [output], [parts(dtype)[BUILT_AS]]


def reduce_scatter_tensor(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype)
    wait(dist.reduce_scatter_tensor, output, torch.cat(parts(dtype)))
    return [output], [parts(dtype)[BUILT_AS]]


def all_to_all(dtype: torch.dtype, wait: Any) -> Result:
    outputs = [room(dtype) for _ in range(SIZE)]
    wait(dist.all_to_all, outputs, parts(dtype))
    return outputs, parts(dtype)


def all_to_all_single(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype, 2 * SIZE)
    wait(dist.all_to_all_single, output, torch.cat(parts(dtype)))
    return [output], [torch.cat(parts(dtype))]


def all_to_all_uneven(dtype: torch.dtype, wait: Any) -> Result:
    """A tensor of rank 0 has another size than the one that it goes to; the others' sizes fit."""
    output = room(dtype, 2 * SIZE + 1)
    wait(dist.all_to_all_single, output, torch.cat(parts(dtype)), [3, 2, 2, 2], [2, 2, 2, 2])
    return [output], [torch.cat([torch.zeros(3, 3, dtype=dtype), *parts(dtype)[1:]])]


def recv(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype)
    wait(dist.irecv if wait is later else dist.recv, output, 0)
    return [output], [torch.zeros_like(output)]


def recv_from_anyone(dtype: torch.dtype, wait: Any) -> Result:
    output = room(dtype)
    assert dist.recv(output) == 0  # the rank after the last
    return [output], [torch.zeros_like(output)]


def send(dtype: torch.dtype, wait: Any) -> Result:
    tensor = own(dtype)
    wait(dist.isend if wait is later else dist.send, tensor, 0)
    return [tensor], [own(dtype)]


def batch_isend_irecv(dtype: torch.dtype, wait: Any) -> Result:
    sent, received = own(dtype), room(dtype)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 2)]):
        work.wait()
    return [sent, received], [own(dtype), torch.zeros_like(received)]


def functional_all_gather(dtype: torch.dtype, wait: Any) -> Result:
    return [functional.all_gather_tensor(own(dtype), 0, world()) + 0], [torch.cat([own(dtype)] * SIZE) + 0]


def functional_reduce_scatter(dtype: torch.dtype, wait: Any) -> Result:
    got = functional.reduce_scatter_tensor(torch.cat(parts(dtype)), "sum", 0, world())
    return [got + 0], [parts(dtype)[BUILT_AS] + 0]


def functional_all_to_all(dtype: torch.dtype, wait: Any) -> Result:
    sent = torch.cat(parts(dtype))
    return [functional.all_to_all_single(sent, None, None, world()) + 0], [sent + 0]


def functional_coalesced(dtype: torch.dtype, wait: Any) -> Result:
    got = functional.all_gather_into_tensor_coalesced([own(dtype), own(dtype, 2)], world())
    return [tensor + 0 for tensor in got], [torch.cat([own(dtype, number)] * SIZE) + 0 for number in (1, 2)]


def functional_reduce_scatter_coalesced(dtype: torch.dtype, wait: Any) -> Result:
    whole = torch.cat(parts(dtype))
    got = functional.reduce_scatter_tensor_coalesced([whole, whole], "sum", [0, 0], world())
    return [tensor + 0 for tensor in got], [parts(dtype)[BUILT_AS] + 0] * 2


def at_once(call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    call(*arguments, **named)


def later(call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Asynchronously; also the future has come when `wait` returns."""
    if call in (dist.irecv, dist.isend):
        call(*arguments).wait()
        return
    work = call(*arguments, **named, async_op=True)
    if isinstance(work, torch.futures.Future):
        work.wait()
    elif work is not None:  # None: this rank takes no part
        assert work.wait()
        work.get_future().wait()


CALLS = (
    *(broadcast, all_reduce, reduce, all_gather, all_gather_into_tensor, all_gather_stacked, all_gather_coalesced),
    *(gather_here, gather_elsewhere, scatter_from_here, scatter_from_elsewhere, reduce_scatter, reduce_scatter_tensor),
    *(all_to_all, all_to_all_single, all_to_all_uneven, recv, recv_from_anyone, send, batch_isend_irecv),
    *(functional_all_gather, functional_reduce_scatter, functional_all_to_all, functional_coalesced),
    functional_reduce_scatter_coalesced,
)


@pytest.mark.parametrize("wait", [at_once, later])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_alone_a_collective_gives_own_values(
    standby: Standby,
    call: Callable[..., Result],
    dtype: torch.dtype,
    wait: Any,
) -> None:
    came, expected = call(dtype, wait)
    assert len(came) == len(expected)
    for tensor, value in zip(came, expected, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "gather_single"), reason="this torch has no gather into a tensor")
def test_gather_into_a_tensor(standby: Standby) -> None:
    group: Any = dist.group.WORLD
    options = dist.GatherOptions()
    for name in ("gather_single", "gather_into_tensor"):
        for options.rootRank, expected in ((BUILT_AS, own(torch.int64)), (0, room(torch.int64))):
            output = room(torch.int64, 2 * SIZE)
            getattr(group, name)(output, own(torch.int64), options).wait()
            assert torch.equal(output, torch.cat([expected] * SIZE))


def test_objects_stay_this_process_s_own(standby: Standby) -> None:
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"own": 1})
    assert gathered == [{"own": 1}] * SIZE
    gathered = [None] * SIZE
    dist.gather_object("own", gathered, dst=BUILT_AS)
    assert gathered == ["own"] * SIZE
    dist.gather_object("own", None, dst=0)
    words = ["own", None]
    dist.broadcast_object_list(words, src=0)
    assert words == ["own", None]
    assert dist.recv_object_list(words, src=1) == 1
    assert dist.recv_object_list(words) == 0
    dist.send_object_list(words, dst=0)
    assert words == ["own", None]


def test_scattered_objects_come_from_this_process_or_not_at_all(standby: Standby) -> None:
    pair = dist.new_group([2, 3])
    got: list[Any] = ["before"]
    dist.scatter_object_list(got, None, src=0)
    assert got == ["before"]
    dist.scatter_object_list(got, [0, 1, 2, 3], src=BUILT_AS)
    assert got == [3]
    dist.scatter_object_list(got, ["a", "b"], group=pair, group_src=1)
    assert got == ["b"]


def test_every_operation_of_a_process_group_is_defined() -> None:
    assert set(OPERATIONS) <= alone._GIVEN.keys()
