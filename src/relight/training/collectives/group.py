"""The process groups that scripts, DDP and DeviceMesh hold: objects for the whole job, with real groups inside.

The inner group belongs to a generation. At Stop its connections are broken and operations fail; at Resume a new
one, formed under the new generation's keys, takes its place. What a collective does when its generation is
closed depends on where it stands in the step (see `Gate`).
"""

import collections
import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from relight.errors import StepInterrupted
from relight.training.collectives.backward import Backward
from relight.training.collectives.fence import Fence, LocalFence, Sums
from relight.training.collectives.groups import Ranks, group_name
from relight.training.collectives.sockets import GroupSockets
from relight.training.collectives.waits import Waiters, Waits
from relight.training.connection.store import GenerationStore, StoreClient
from relight.training.torch_private.autograd import RUN_BACKWARD, not_compiled
from relight.training.torch_private.groups import (
    OPERATIONS,
    POINT_TO_POINT,
    REDUCE_SCATTERS,
    abort_nccl,
    cpu_backend,
    make_detached_group,
    make_inner_group,
)
from relight.wire.board import Board


class Gate(Protocol):
    """What the process group asks about every operation; the runtime answers."""

    closed: bool  # Stop has arrived; nothing of this generation may go on
    launches: int  # operations that the script has launched, and exchanges that it has begun to wait for

    def count_collective(self) -> None:
        """An operation is about to be launched."""

    def waited(self, nanoseconds: int) -> None:
        """Somebody waited so long for an operation."""

    def is_protected(self) -> bool:
        """Whether a failure here can be undone: inside a step, before its write."""

    def cut(self, operation: str) -> None:
        """An operation that cannot be repeated was cut short by a recovery; its result is this rank's own."""

    def unprotected(self, operation: str) -> None:
        """An operation was launched where a recovery could not repeat it."""

    def await_verdict(self) -> bool:
        """Something broke before Stop arrived: wait for it. False if none comes."""


class Inner:
    """One formed group, the sockets it opened, and its operations in flight."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sockets: GroupSockets | None = None,
        cuda: torch.device | None = None,
        waits: Waits | None = None,
        local: LocalFence | None = None,
    ) -> None:
        self.group = group
        self._cpu = cpu_backend(group)
        self._fence = Fence(group.size(), local)
        self._sockets = sockets
        self.is_detached = sockets is None  # operations complete at once, alone
        self._cuda = cuda
        self._waits = waits or Waits()
        self._backward = Backward()
        self._operations: collections.deque[_Waitable] = collections.deque()
        self._broken = False  # connections were cut; set before that, and looked at after an operation is remembered

    def launch(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Start an operation; the work it returns ends by itself or at Stop, never later."""
        if self._cuda is not None:
            return getattr(self.group, operation)(*args, **kwargs)  # NCCL's own abort ends it
        if operation in POINT_TO_POINT:
            return _Exchange(getattr(self.group, operation)(*args, **kwargs), args[0], self._remember, self._waits)
        over = self._waits.begin() if self._waits.show is not None else None
        if operation in REDUCE_SCATTERS:
            return self._remember(self._reduce_scatter(over, *args, **kwargs))
        return self._remember(_Operation(getattr(self.group, operation)(*args, **kwargs), self._backward, over))

    def reduce_bucket(self, *args: Any, **kwargs: Any) -> Any:
        """All-reduce for DDP's reducer in a backward pass, whose end waits for it: gloo's own work.

        The reducer asks it for nothing but its future, so there is nothing for Python to do.
        """
        if self._cuda is not None or self._waits.show is not None:
            return self.launch("allreduce", *args, **kwargs)
        work, last = self._cpu.allreduce(*args, **kwargs), self._backward.last()
        if isinstance(last, _Buckets):
            last.works.append(work)
            if self._broken:
                self._abandon_soon()
            return work
        buckets = _Buckets(work)
        if not self._backward.adopt(buckets):
            return self._remember(_Operation(work, self._backward))
        self._remember(buckets)
        return work

    def _reduce_scatter(
        self, over: Callable[[], None] | None, outputs: Any, inputs: Any, options: Any = None
    ) -> "_Operation":
        """As gloo does it: reduce all of it everywhere, keep a part. With the same bits.

        gloo's own returns a work that does the last step only when it is waited for, is never complete, and cannot be
        walked away from.
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

        return _Parts(works, keep, self._backward, over)

    def fence(self, row: Sequence[int]) -> Sums:
        """Enter the barrier, saying `row` (see `Fence.enter`)."""
        return self._fence.enter(row, self._start_fence)

    def _start_fence(self, tensor: torch.Tensor) -> Any:
        """Start the all-reduce that only one thread of ours waits for: no future, half the time of `launch`."""
        work = self.group.allreduce([tensor])
        return work if self._cuda is not None else self._remember(_WaitedFor(work))

    def _remember(self, running: "_Waitable") -> "_Waitable":
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
            if not isinstance(operation, _Exchange) and not operation.is_over():
                operation.await_end()

    def break_connections(self) -> None:
        """Make every operation in flight fail within milliseconds. Returns at once."""
        self._broken = True
        self._fence.abandon()
        if self._cuda is not None:
            abort_nccl(self.group, self._cuda)
        if self._sockets is not None:
            self._sockets.cut()
            self._abandon_soon()

    def is_broken(self) -> bool:
        return self._sockets is not None and self._sockets.is_broken()

    def retire(self) -> None:
        """Drop the group beside the main thread, or keep it for ever if an operation is stuck in it."""
        self._backward.forget()
        if not self.is_detached:
            threading.Thread(target=self._drop, name="relight-drop", daemon=True).start()

    def _abandon_soon(self) -> None:
        threading.Thread(target=self._abandon_stuck, name="relight-abandon", daemon=True).start()

    def _abandon_stuck(self) -> None:
        """gloo can lose the completion of a send whose connection fails; nobody may wait for such an operation."""
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


# After the cut, operations fail within milliseconds; what has not failed by then never will.
_STUCK_SECONDS = 0.05
_POLL_SECONDS = 0.002
_left_behind: list[Inner] = []


class _Waitable(Protocol):
    """An operation of a gloo group that can be walked away from."""

    def is_over(self) -> bool:
        """Whether gloo is done with it."""

    def abandon(self) -> None:
        """Whoever waits is told that it failed."""

    def await_end(self) -> None:
        """Returns once the result is there. Raises if the operation failed or was abandoned."""


class _WaitedFor:
    """One that its own thread waits for, looking up now and then."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.is_abandoned = False

    def is_over(self) -> bool:
        return bool(self._work.is_completed())

    def abandon(self) -> None:
        self.is_abandoned = True

    def await_end(self) -> None:
        self.wait()

    @not_compiled
    def wait(self) -> bool:
        return _await(self._work, self)


class _Buckets:
    """Reductions of DDP's buckets: those of one backward pass, which waits for them at its end."""

    def __init__(self, first: Any) -> None:
        self.works = [first]
        self.is_abandoned = False

    def is_over(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def abandon(self) -> None:
        self.is_abandoned = True

    @not_compiled
    def await_end(self) -> None:
        for work in reversed(self.works):  # once the last one is there the others are, mostly
            if not work.is_completed():
                _await(work, self)
        self.works.clear()  # whoever asks later need not look at each


@not_compiled
def _await(work: Any, operation: _WaitedFor | _Buckets) -> bool:
    """Returns once gloo's `work` is done. Raises what it failed of, or StepInterrupted if it was walked away from."""
    patience = _SLICE
    while True:
        if operation.is_abandoned and not work.is_completed():
            raise _abandoned()
        try:
            return bool(work.wait(patience))
        except RuntimeError:  # the slice is over, or it failed
            if work.is_completed():
                return bool(work.wait())  # raises what it failed of
        patience = min(2 * patience, _LONGEST_SLICE)


def _abandoned() -> StepInterrupted:
    return StepInterrupted("the operation was abandoned: its generation is closed")


class _Promise:
    """A future that whoever comes first settles, gloo or we."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled = False
        self._result: Any = None
        self._trigger: torch.futures.Future[Any] = torch.futures.Future()
        # An error must reach C++ (DDP's reducer) as a future's error, and only `then` can make one of those.
        self.future = self._trigger.then(self._deliver)

    def settle(self, result: Any) -> None:
        with self._lock:
            if self._settled:
                return
            self._settled = True
        self._result = result
        self._trigger.set_result(None)

    def _deliver(self, _: torch.futures.Future[Any]) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class _Operation(dist.Work):
    """One that DDP's reducer or a script may hold. Nothing of Python runs on gloo's threads unless it must."""

    def __init__(self, work: Any, backward: Backward, over: Callable[[], None] | None = None) -> None:
        """`over` is called when the operation has ended, however."""
        super().__init__()
        self.on_wait: Callable[[int], None] | None = None  # told how long somebody waited, in ns
        self._work = work
        self._waited_for = _WaitedFor(work)
        self._backward = backward
        self._promise: _Promise | None = None
        self._over = over
        if over is not None:
            work.get_future().add_done_callback(lambda _: over())

    def is_over(self) -> bool:
        return self._waited_for.is_over()

    def abandon(self) -> None:
        self._waited_for.abandon()
        if self._promise is not None:
            self._promise.settle(_abandoned())
        if self._over is not None:
            self._over()

    def await_end(self) -> None:
        """Returns once the result is there. Raises if the operation failed or was abandoned."""
        self._waited_for.wait()

    @not_compiled
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - the controller notices what hangs
        since_ns = time.monotonic_ns()
        try:
            self.await_end()
        finally:
            if self.on_wait is not None:
                self.on_wait(time.monotonic_ns() - since_ns)
        return True

    @not_compiled
    def is_completed(self) -> bool:
        return self._waited_for.is_abandoned or self.is_over()

    @not_compiled
    def get_future(self) -> torch.futures.Future[Any]:
        if self._promise is None and self._backward.adopt(self):
            future: torch.futures.Future[Any] = self._work.get_future()
            return future
        return self._promised()

    def _promised(self) -> torch.futures.Future[Any]:
        if self._promise is None:
            self._promise = _Promise()
            self._work.get_future().add_done_callback(self._on_done)
            if self._waited_for.is_abandoned:  # by another thread, before there was anything to settle
                self._promise.settle(_abandoned())
        return self._promise.future

    def _on_done(self, done: torch.futures.Future[Any]) -> None:
        assert self._promise is not None
        try:
            self._promise.settle(self._result(done))
        except (RuntimeError, StepInterrupted) as error:
            self._promise.settle(error)

    def _result(self, done: torch.futures.Future[Any]) -> Any:
        return done.value()


class _Parts(_Operation):
    """Several of gloo's, of whose results something is made once all of them are there."""

    def __init__(
        self, works: Sequence[Any], finish: Callable[[], Any], backward: Backward, over: Callable[[], None] | None
    ) -> None:
        super().__init__(works[-1], backward, over)
        self._before = [_WaitedFor(work) for work in works[:-1]]
        self._lock = threading.Lock()
        self._finish = finish
        self._finished: Any = None

    def is_over(self) -> bool:
        return super().is_over() and all(part.is_over() for part in self._before)

    def abandon(self) -> None:
        for part in self._before:
            part.abandon()
        super().abandon()

    def await_end(self) -> None:
        super().await_end()
        self._conclude()

    def _result(self, done: torch.futures.Future[Any]) -> Any:
        super()._result(done)  # the last one is done, or raises; gloo calls it completed only behind this callback
        return self._conclude()

    def _conclude(self) -> Any:
        for part in self._before:
            part.wait()
        with self._lock:
            if self._finished is None:
                self._finished = self._finish()
            return self._finished

    @not_compiled
    def get_future(self) -> torch.futures.Future[Any]:
        return self._promised()  # gloo's own comes before the result


class _Exchange(dist.Work):
    """A send or a receive, of pipeline stages for instance.

    gloo cannot be asked whether one is done, only be waited for; and a wait with a time limit that passes closes all
    connections of the group. So an expendable thread waits without a limit, and whoever needs the result waits for
    that thread, and can walk away from it. Until somebody waits, nothing can be stuck: gloo drops such an operation
    together with its group.
    """

    def __init__(self, work: Any, tensors: Any, remember: Callable[["_Exchange"], Any], waits: Waits) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors  # gloo may still read or write them after everybody walked away
        self._remember = remember
        self._waits = waits
        self._done: concurrent.futures.Future[bool] | None = None
        self.gate: Gate | None = None  # told that somebody waits

    def is_over(self) -> bool:
        return self._done is not None and self._done.done()

    def abandon(self) -> None:
        self._settle(error=_abandoned())

    def await_end(self) -> None:
        self.wait()

    @not_compiled
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - the controller notices what hangs
        if self.gate is not None and not self.is_over():
            self.gate.launches += 1
        over = self._waits.begin()
        try:
            if self._done is None:
                self._done = concurrent.futures.Future()
                _waiters.run(self._await_gloo)
                self._remember(self)
            return self._done.result()
        finally:
            over()

    @not_compiled
    def is_completed(self) -> bool:
        return self.is_over()

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())

    def _await_gloo(self) -> None:
        try:
            self._settle(bool(self._work.wait()))
        except Exception as error:
            self._settle(error=error)

    def _settle(self, result: bool = True, error: Exception | None = None) -> None:
        assert self._done is not None
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # the thread or `abandon`: the first one counts
            if error is None:
                self._done.set_result(result)
            else:
                self._done.set_exception(error)


_waiters = Waiters()
# How late a lost completion is noticed, which is one in a hundred recoveries; a failed operation returns by itself. The
# end of a slice is an exception of C++, and costs 0.3 ms: slices are longer than most waits, and grow.
_SLICE = timedelta(milliseconds=100)
_LONGEST_SLICE = timedelta(milliseconds=1600)


Inners = dict[Ranks, Inner]  # by their members


class Forming:
    """Groups being formed on an expendable thread, one after the other.

    A group's sockets are told from others by when they were opened (`GroupSockets`), hence one after the other. All
    ranks go through their groups in one order, so nobody waits in a circle.

    A peer that dies after it published its address and before it connected leaves the others inside gloo's
    constructor for many times the timeout, and no cut helps there. So the thread that must obey orders never forms a
    group itself: it waits for this one, and walks away when the generation is closed.
    """

    def __init__(
        self,
        client: StoreClient,
        generation: int,
        groups: Sequence[Ranks],
        rank: int,
        cuda: torch.device | None,
        waits: Waits | None = None,
        board: Board | None = None,
    ) -> None:
        """`board` is what this rank has in common with others of its host, if anything."""
        self.result: concurrent.futures.Future[Inners] = concurrent.futures.Future()

        def form_one(ranks: Ranks) -> Inner:
            name = group_name(ranks)
            sockets = GroupSockets(len(ranks) - 1)
            store = GenerationStore(client, generation, f"{name}/")
            group = make_inner_group(store, ranks.index(rank), len(ranks), f"{name}@{generation}", cuda)
            sockets.formed()
            local = LocalFence(board, generation, rank) if board and board.ranks == len(ranks) else None
            return Inner(group, sockets, cuda, waits, local)

        def form() -> None:
            try:
                self.result.set_result({ranks: form_one(ranks) for ranks in groups})
            except BaseException as error:
                self.result.set_exception(error)

        threading.Thread(target=form, name=f"relight-form-{generation}", daemon=True).start()


class RelightProcessGroup(dist.ProcessGroup):
    """Delegates every operation to the inner group of the current generation.

    `ranks` are its members: others, once a standby that holds it takes a rank. To a process that is no member it equals
    c10d's NON_GROUP_MEMBER, so c10d skips operations on it, and a script that looks for its own group passes it over.
    """

    def __init__(self, gate: Gate, rank: Callable[[], int], ranks: Ranks, device: torch.device, place: int = 0) -> None:
        """`place`: its number among all groups of the job."""
        super().__init__(ranks.index(rank()) if rank() in ranks else 0, len(ranks))  # type: ignore[call-arg]
        self._gate = gate
        self._rank = rank
        self._size = len(ranks)
        self._device = device
        self._name = self._description = ""
        self.ranks = ranks
        self.place, self.built_as = place, rank()
        self.inner: Inner | None = None
        self.serves_reducer = False  # DDP's; then what C++ launches in a backward pass is a bucket of its
        self.make_group: Callable[[Sequence[int], str, str | None], RelightProcessGroup | None] | None = None

    def new_group(
        self, ranks: Sequence[int], *, group_name: str, group_desc: str | None = None, **_: Any
    ) -> "RelightProcessGroup | None":
        """c10d asks the default group for every group that a script makes, of whatever backend. None: no member."""
        assert self.make_group is not None
        return self.make_group(ranks, group_name, group_desc)

    @property
    def has_member(self) -> bool:
        """Whether the rank that this process holds is a member."""
        return self._rank() in self.ranks

    def __eq__(self, other: object) -> bool:
        return self is other or (other == dist.GroupMember.NON_GROUP_MEMBER and not self.has_member)

    def __hash__(self) -> int:
        return id(self)

    def attach(self, inner: Inner) -> None:
        self.inner = inner

    def detach(self) -> None:
        """From now on operations complete at once, alone: for a standby, and while a recovery resets DDP."""
        if self.inner is not None:
            self.inner.retire()
        self.inner = Inner(make_detached_group(self._size - 1, self._size, self._device))

    def getBackendName(self) -> str:
        return "relight"

    def getRank(self) -> int:
        rank = self._rank()
        return self.ranks.index(rank) if rank in self.ranks else -1

    def getSize(self) -> int:
        return self._size

    # C++ keeps a name in the backends of a group, of which this one has none; DeviceMesh finds its groups by it.
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @not_compiled
    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        if self.serves_reducer and sys._getframe(1).f_code is RUN_BACKWARD:
            gate, inner = self._gate, self.inner
            if inner is not None and not inner.is_detached and not gate.closed and gate.is_protected():
                gate.count_collective()
                gate.launches += 1
                return inner.reduce_bucket(*args, **kwargs)
        return self._launch("allreduce", *args, **kwargs)

    def _launch(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        gate = self._gate
        assert self.inner is not None
        if self.inner.is_detached:
            getattr(self.inner.group, operation)(*args, **kwargs)
            return _Done(args[0] if args else None)
        protected = gate.is_protected()
        if gate.closed:
            if protected:
                raise StepInterrupted(f"{operation}: the generation was closed by a failure elsewhere")
            gate.cut(operation)
            return _Done(args[0] if args else None)  # DDP's reducer takes its bucket from there
        gate.count_collective()
        gate.launches += 1
        if protected:
            work = self.inner.launch(operation, *args, **kwargs)
            if isinstance(work, _Operation):
                work.on_wait = gate.waited
            elif isinstance(work, _Exchange):
                work.gate = gate
            return work
        gate.unprotected(operation)
        try:
            work = self.inner.launch(operation, *args, **kwargs)
        except RuntimeError:
            if not gate.await_verdict():
                raise
            gate.cut(operation)
            return _Done(args[0] if args else None)
        if isinstance(work, _Exchange):
            work.gate = gate
        return _CuttableWork(work, gate, operation)


def _delegate(operation: str) -> Callable[..., Any]:
    @not_compiled
    def launch(self: RelightProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self._launch(operation, *args, **kwargs)

    launch.__name__ = operation
    return launch


for _operation in set(OPERATIONS) - vars(RelightProcessGroup).keys():
    setattr(RelightProcessGroup, _operation, _delegate(_operation))


class _Done(dist.Work):
    """The work of an operation that is over: one that was cut before it was launched, or a detached one."""

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._result = result

    @not_compiled
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    @not_compiled
    def is_completed(self) -> bool:
        return True

    @not_compiled
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

    @not_compiled
    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._work.wait() if timeout is None or timeout.total_seconds() <= 0 else self._work.wait(timeout)
        except (RuntimeError, StepInterrupted):
            if not self._gate.await_verdict():
                raise
            self._gate.cut(self._operation)
            return True

    @not_compiled
    def is_completed(self) -> bool:
        return self._work.is_completed()

    @not_compiled
    def get_future(self) -> Any:
        return self._work.get_future()
