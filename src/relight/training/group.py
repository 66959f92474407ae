"""The process group that scripts, DDP and DeviceMesh hold: one object for the whole job, a real group inside.

The inner group belongs to a generation. At Stop its connections are broken and operations fail; at Resume a new
one, formed under the new generation's keys, takes its place. What a collective does when its generation is
closed depends on where it stands in the step (see `Gate`).
"""

import concurrent.futures
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from relight.errors import StepInterrupted
from relight.training.sockets import GroupSockets
from relight.training.store import GenerationStore, StoreClient
from relight.training.torch_private import OPERATIONS, abort_nccl, make_detached_group, make_inner_group


class Gate(Protocol):
    """What the process group asks about every operation; the runtime answers."""

    closed: bool  # Stop has arrived; nothing of this generation may go on

    def count_collective(self) -> None:
        """An operation is about to be launched."""

    def is_protected(self) -> bool:
        """Whether a failure here can be undone: inside a step, before its write."""

    def cut(self, operation: str) -> None:
        """An operation that cannot be repeated was cut short by a recovery; its result is this rank's own."""

    def unprotected(self, operation: str) -> None:
        """An operation was launched where a recovery could not repeat it."""

    def await_verdict(self) -> bool:
        """Something broke before Stop arrived: wait for it. False if none comes."""


class Inner:
    """One formed group and the sockets it opened."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sockets: GroupSockets | None = None,
        cuda: torch.device | None = None,
        *,
        detached: bool = False,
    ) -> None:
        self.group = group
        self.detached = detached
        self._sockets = sockets
        self._cuda = cuda

    def break_connections(self) -> None:
        """Make every operation in flight fail within milliseconds."""
        if self._sockets is not None:
            self._sockets.shut_down()
        if self._cuda is not None:
            abort_nccl(self.group, self._cuda)

    def is_broken(self) -> bool:
        return self._sockets is not None and self._sockets.is_broken()


class Forming:
    """A group being formed on an expendable thread.

    A peer that dies after it published its address and before it connected leaves the others inside gloo's
    constructor for many times the timeout. So the thread that must obey orders never forms a group itself: it
    waits for this one, and walks away when the generation is closed.
    """

    def __init__(
        self,
        client: StoreClient,
        generation: int,
        name: str,
        rank: int,
        size: int,
        cuda: torch.device | None,
    ) -> None:
        self._sockets = GroupSockets()
        self.result: concurrent.futures.Future[Inner] = concurrent.futures.Future()
        store = GenerationStore(client, generation, f"{name}/")

        def form() -> None:
            try:
                group = make_inner_group(store, rank, size, f"{name}@{generation}", cuda)
                self._sockets.formed()
                self.result.set_result(Inner(group, self._sockets, cuda))
            except BaseException as error:
                self.result.set_exception(error)

        threading.Thread(target=form, name=f"relight-form-{generation}", daemon=True).start()

    def abandon(self) -> None:
        """Walk away; what exists of the group is broken, so that its peers notice."""
        self._sockets.shut_down()


class RelightProcessGroup(dist.ProcessGroup):
    """Delegates every operation to the inner group of the current generation."""

    def __init__(self, gate: Gate, rank: Callable[[], int], size: int, device: torch.device) -> None:
        super().__init__(rank(), size)  # type: ignore[call-arg]
        self._gate = gate
        self._rank = rank
        self._size = size
        self._device = device
        self.inner: Inner | None = None

    def attach(self, inner: Inner) -> None:
        self.inner = inner

    def detach(self) -> None:
        """From now on operations complete at once, alone: for a standby, and while a recovery resets DDP."""
        self.inner = Inner(make_detached_group(self._size - 1, self._size, self._device), detached=True)

    def getBackendName(self) -> str:
        return "relight"

    def getRank(self) -> int:
        return self._rank()

    def getSize(self) -> int:
        return self._size

    def _launch(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        gate = self._gate
        assert self.inner is not None
        if self.inner.detached:
            getattr(self.inner.group, operation)(*args, **kwargs)
            return _Done(args[0] if args else None)
        protected = gate.is_protected()
        if gate.closed:
            if protected:
                raise StepInterrupted(f"{operation}: the generation was closed by a failure elsewhere")
            gate.cut(operation)
            return _Done()
        gate.count_collective()
        if protected:
            return getattr(self.inner.group, operation)(*args, **kwargs)
        gate.unprotected(operation)
        try:
            work = getattr(self.inner.group, operation)(*args, **kwargs)
        except RuntimeError:
            if not gate.await_verdict():
                raise
            gate.cut(operation)
            return _Done()
        return _CuttableWork(work, gate, operation)


def _delegate(operation: str) -> Callable[..., Any]:
    def launch(self: RelightProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self._launch(operation, *args, **kwargs)

    launch.__name__ = operation
    return launch


for _operation in OPERATIONS:
    setattr(RelightProcessGroup, _operation, _delegate(_operation))


class _Done(dist.Work):
    """The work of an operation that is over: one that was cut before it was launched, or a detached one."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class _CuttableWork(dist.Work):
    """An operation outside the protected part of a step: if a recovery breaks it, it ends without a result."""

    def __init__(self, work: dist.Work, gate: Gate, operation: str) -> None:
        super().__init__()
        self._work = work
        self._gate = gate
        self._operation = operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._work.wait() if timeout is None or timeout.total_seconds() <= 0 else self._work.wait(timeout)
        except RuntimeError:
            if not self._gate.await_verdict():
                raise
            self._gate.cut(self._operation)
            return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()
