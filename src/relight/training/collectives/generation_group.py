"""A group of one generation: formed by its members, broken when the generation is closed."""

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from relight.device.choose import is_accelerated
from relight.training.collectives.backward import Backward
from relight.training.collectives.barrier_allreduce import BarrierAllReduce, SharedMemoryAllReduce, Sums
from relight.training.collectives.groups import Ranks, group_name
from relight.training.collectives.operations import Buckets, Exchange, Operation, Parts, Waitable, WaitedFor
from relight.training.collectives.sockets import GroupSockets
from relight.training.collectives.waits import Waits
from relight.training.connection.store import GenerationStore, StoreClient
from relight.training.torch_private.distributed.c10d import Store
from relight.training.torch_private.distributed.groups import (
    POINT_TO_POINT,
    REDUCE_SCATTERS,
    abort_backend,
    cpu_backend,
    make_generation_group,
)
from relight.wire.memory.shared_barrier import SharedBarrier

_STUCK_SECONDS = 0.05  # after the cut, operations fail within milliseconds, or never
_POLL_SECONDS = 0.002
_left_behind: list["GenerationGroup"] = []


class GenerationGroup:
    """One formed group, the sockets it opened, and its operations in flight."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sockets: GroupSockets | None = None,
        device: torch.device | None = None,
        waits: Waits | None = None,
        local: SharedMemoryAllReduce | None = None,
        store: Store | None = None,
    ) -> None:
        self.group = group
        self._store = store  # kept: C++ alone would not keep what is written in Python
        self._cpu = cpu_backend(group)
        self._all_reduce = BarrierAllReduce(group.size(), local)
        self._sockets = sockets
        self.is_detached = sockets is None  # operations complete at once, alone
        self._device = device  # whose own collectives carry its tensors; None: gloo carries all
        self._waits = waits or Waits()
        self._backward = Backward()
        self._operations: collections.deque[Waitable] = collections.deque()
        self._broken = False  # connections were cut; set before that, and looked at after an operation is remembered

    def launch(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Start an operation; the work it returns ends by itself or at Stop, never later."""
        if self._device is not None and not _are_in_host_memory((*args, *kwargs.values())):
            return getattr(self.group, operation)(*args, **kwargs)  # the device's own abort ends it
        if operation in POINT_TO_POINT:
            # gloo ends the process that has it send or receive other memory than the host's.
            staged = [] if _are_in_host_memory(args) else [tensor.cpu() for tensor in args[0]]
            work = getattr(self.group, operation)(staged or args[0], *args[1:], **kwargs)
            received = [] if operation == "send" else staged
            return Exchange(work, args[0], self._remember, self._waits, staged, received)
        over = self._waits.begin() if self._waits.are_shown else None
        if operation in REDUCE_SCATTERS:
            return self._remember(self._reduce_scatter(over, *args, **kwargs))
        return self._remember(Operation(getattr(self.group, operation)(*args, **kwargs), self._backward, over))

    def reduce_bucket(self, *args: Any, **kwargs: Any) -> Any:
        """All-reduce for DDP's reducer in a backward pass, whose end waits for it: gloo's own work.

        The reducer asks it for nothing but its future, so there is nothing for Python to do.
        """
        if self._device is not None or self._waits.are_shown or not _are_in_host_memory(args):
            return self.launch("allreduce", *args, **kwargs)
        work, last = self._cpu.allreduce(*args, **kwargs), self._backward.last()
        if isinstance(last, Buckets):
            last.works.append(work)
            if self._broken:
                self._abandon_soon()
            return work
        buckets = Buckets(work)
        if not self._backward.adopt(buckets):
            return self._remember(Operation(work, self._backward))
        self._remember(buckets)
        return work

    def _reduce_scatter(
        self, over: Callable[[], None] | None, outputs: Any, inputs: Any, options: Any = None
    ) -> "Operation":
        """As gloo does it: reduce all of it everywhere, keep a part. With the same bits.

        gloo's own returns a work that does the last step only when it is waited for, is never complete, and cannot be
        abandoned.
        """
        several = isinstance(outputs, list)
        outputs, inputs = (outputs, inputs) if several else ([outputs], [inputs])
        buffers = [tensor.detach().clone() for tensor in inputs]
        reduction = dist.AllreduceOptions()
        if options is not None:
            reduction.reduceOp = options.reduceOp
        works = [self.group.allreduce([buffer], reduction) for buffer in buffers]
        rank, size = self.group.rank(), self.group.size()

        def keep() -> list[torch.Tensor]:
            with torch.no_grad():
                for output, buffer in zip(outputs, buffers, strict=True):
                    output.copy_(buffer.chunk(size)[rank])
            return list(outputs)

        return Parts(works, keep, self._backward, over)

    def sum_over_ranks(self, row: Sequence[int]) -> Sums:
        """Enter the barrier with `row` (see `BarrierAllReduce.enter`)."""
        return self._all_reduce.enter(row, self._start_all_reduce)

    def _start_all_reduce(self, tensor: torch.Tensor) -> Any:
        """Start the all-reduce that only one thread of ours waits for: no future, half the time of `launch`."""
        return self._remember(WaitedFor(self.group.allreduce([tensor])))  # gloo's: it lies in host memory

    def _remember(self, running: "Waitable") -> "Waitable":
        self._operations.append(running)
        if self._broken:  # the generation was closed between the look at it and the launch
            self._abandon_soon()
        while len(self._operations) > 1 and self._operations[0].is_over():  # this one is hardly over yet
            self._operations.popleft()
        return running

    def await_launched(self) -> None:
        """Returns once every collective launched so far has its result. Raises as waiting for it would.

        Sends and receives are left out: their peers may wait for something else first.
        """
        for operation in tuple(self._operations):
            if not isinstance(operation, Exchange) and not operation.is_over():
                operation.await_end()

    def break_connections(self) -> None:
        """Make every operation in flight fail within milliseconds. Returns at once."""
        self._broken = True
        self._all_reduce.abandon()
        if self._device is not None:
            threading.Thread(target=self._abort, args=(self._device,), name="relight-abort", daemon=True).start()
        if self._sockets is not None:
            self._sockets.cut()
            self._abandon_soon()

    def _abort(self, device: torch.device) -> None:
        """Abort the device's collectives, beside other groups': each may wait for whatever hangs on the device."""
        abort_backend(self.group, device)

    def is_broken(self) -> bool:
        return self._sockets is not None and self._sockets.is_broken()

    def retire(self) -> None:
        """Destroy the group beside the main thread, or keep it forever if an operation is stuck in it."""
        self._backward.forget()
        if not self.is_detached:
            threading.Thread(target=self._drop, name="relight-drop", daemon=True).start()

    def _abandon_soon(self) -> None:
        threading.Thread(target=self._abandon_stuck, name="relight-abandon", daemon=True).start()

    def _abandon_stuck(self) -> None:
        """Abandon operations that did not fail: gloo can lose the completion of a send whose connection fails."""
        if not self._await_operations():
            for operation in list(self._operations):
                operation.abandon()

    def _drop(self) -> None:
        if not self._await_operations():
            _left_behind.append(self)  # its destructor would wait for the stuck operation

    def _await_operations(self) -> bool:
        deadline = time.monotonic() + _STUCK_SECONDS
        while any(not operation.is_over() for operation in list(self._operations)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def _are_in_host_memory(arguments: Sequence[Any]) -> bool:
    """Return whether an operation's tensors, given alone or in lists, lie in host memory; False if there are none."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return not is_accelerated(argument)
        if isinstance(argument, (list, tuple)) and argument:
            return _are_in_host_memory(argument)
    return False


GenerationGroups = dict[Ranks, GenerationGroup]  # by their members


class Forming:
    """Groups being formed on an expendable thread, one after the other.

    A group's sockets are recognized by when they were opened (`GroupSockets`), hence one after the other. All ranks go
    through their groups in one order, so that no ranks wait for each other in a circle.

    A peer that dies after it published its address and before it connected leaves the others inside gloo's
    constructor for many times the timeout, and no cut helps there. So the thread that must obey orders never forms a
    group itself: it waits for this one, and stops waiting when the generation is closed.
    """

    def __init__(
        self,
        client: StoreClient,
        generation: int,
        groups: Sequence[Ranks],
        rank: int,
        device: torch.device | None,
        waits: Waits | None = None,
        shared_barrier: SharedBarrier | None = None,
    ) -> None:
        """`shared_barrier` is the memory that this rank shares with other ranks of its host, if any."""
        self.result: concurrent.futures.Future[GenerationGroups] = concurrent.futures.Future()

        def form_one(ranks: Ranks) -> GenerationGroup:
            name = group_name(ranks)
            sockets = GroupSockets(len(ranks) - 1)
            store = GenerationStore(client, generation, f"{name}/")
            group = make_generation_group(store, ranks.index(rank), len(ranks), f"{name}@{generation}", device)
            sockets.formed()
            local = (
                SharedMemoryAllReduce(shared_barrier, generation, rank)
                if shared_barrier and shared_barrier.ranks == len(ranks)
                else None
            )
            return GenerationGroup(group, sockets, device, waits, local, store)

        def form() -> None:
            try:
                self.result.set_result({ranks: form_one(ranks) for ranks in groups})
            except BaseException as error:
                self.result.set_exception(error)

        threading.Thread(target=form, name=f"relight-form-{generation}", daemon=True).start()
