"""Operations in flight: each can be waited for, and abandoned when its generation is closed."""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from relight.errors import StepInterrupted
from relight.training.collectives.backward import Backward
from relight.training.collectives.policy import CollectivePolicy
from relight.training.collectives.waits import Waiters, Waits
from relight.training.torch_private.autograd import not_compiled
from relight.training.torch_private.distributed.groups import ExchangeWork, source_rank_of
from relight.training.torch_private.script_modes import unseen


class Waitable(Protocol):
    """An operation of a gloo group that can be abandoned."""

    def is_over(self) -> bool:
        """Return whether gloo is done with it."""

    def abandon(self) -> None:
        """Have waiting threads raise StepInterrupted."""

    def await_end(self) -> None:
        """Returns once the result is there. Raises if the operation failed or was abandoned."""


class WaitedFor:
    """An operation whose thread waits for it in slices, and looks in between whether it was abandoned."""

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


class Buckets:
    """The reductions of DDP's buckets in one backward pass, which waits for them at its end."""

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
        self.works.clear()  # later calls need not look at each


@not_compiled
def _await(work: Any, operation: WaitedFor | Buckets) -> bool:
    """Returns once gloo's `work` is done. Raises its error, or StepInterrupted if it was abandoned."""
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
    """A future that gloo or `abandon` settles, the first of the two."""

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


class Operation(dist.Work):
    """An operation that DDP's reducer or a script may hold. No Python runs on gloo's threads unless it must."""

    def __init__(self, work: Any, backward: Backward, over: Callable[[], None] | None = None) -> None:
        """`over` is called when the operation has ended, however."""
        super().__init__()
        self._policy: CollectivePolicy | None = None
        self._work = work
        self._waited_for = WaitedFor(work)
        self._backward = backward
        self._promise: _Promise | None = None
        self._over = over
        if over is not None:
            work.get_future().add_done_callback(lambda _: over())

    def report_to(self, policy: CollectivePolicy) -> None:
        """Report the duration of each wait."""
        self._policy = policy

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
            if self._policy is not None:
                self._policy.waited(time.monotonic_ns() - since_ns)
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


class Parts(Operation):
    """Several operations of gloo's whose results are combined once all of them are there."""

    def __init__(
        self, works: Sequence[Any], finish: Callable[[], Any], backward: Backward, over: Callable[[], None] | None
    ) -> None:
        super().__init__(works[-1], backward, over)
        self._before = [WaitedFor(work) for work in works[:-1]]
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
        super()._result(done)  # the last one is done, or raises; gloo calls it completed only after this callback
        return self._conclude()

    @unseen
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


class Exchange(ExchangeWork):
    """A send or a receive, of pipeline stages for instance.

    gloo cannot be asked whether one is done, only be waited for; and a wait with a time limit that passes closes all
    connections of the group. So an expendable thread waits without a limit, and the caller waits for that thread, and
    can abandon it. Before the first wait nothing can be stuck: gloo drops such an operation together with its group.
    """

    def __init__(
        self,
        work: Any,
        tensors: Any,
        remember: Callable[["Exchange"], Any],
        waits: Waits,
        staged: Sequence[torch.Tensor] = (),
        received: Sequence[torch.Tensor] = (),
    ) -> None:
        """`staged`: copies in host memory of a device's tensors. `received`: those that the tensors are to be."""
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._staged = staged  # gloo may still read or write these, or the tensors, after the operation was abandoned
        self._received = received
        self._remember = remember
        self._waits = waits
        self._done: concurrent.futures.Future[bool] | None = None
        self._policy: CollectivePolicy | None = None

    def report_to(self, policy: CollectivePolicy) -> None:
        """Count waits for this operation among the launches."""
        self._policy = policy

    def is_over(self) -> bool:
        return self._done is not None and self._done.done()

    def abandon(self) -> None:
        self._settle(error=_abandoned())

    def await_end(self) -> None:
        self.wait()

    @not_compiled
    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - the controller notices what hangs
        if self._policy is not None and not self.is_over():
            self._policy.launches += 1
        over = self._waits.begin()
        try:
            if self._done is None:
                self._done = concurrent.futures.Future()
                _waiters.run(self._await_gloo)
                self._remember(self)
            result = self._done.result()
            self._take_received()
            return result
        finally:
            over()

    def _take_received(self) -> None:
        received, self._received = self._received, ()
        with torch.no_grad():
            for tensor, value in zip(self._tensors, received, strict=False):
                tensor.copy_(value)

    @not_compiled
    def is_completed(self) -> bool:
        return self.is_over()

    def source_rank(self) -> int:
        return source_rank_of(self._work)

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
