"""The process groups that scripts, DDP and DeviceMesh hold: objects for the whole job, with real groups inside.

The group inside belongs to a generation. At Stop its connections are broken and operations fail; at Resume a new
one, formed under the new generation's keys, takes its place. What a collective does when its generation is
closed depends on where it stands in the step (see `CollectivePolicy`).
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from relight.errors import StepInterrupted
from relight.training.collectives.alone import complete
from relight.training.collectives.generation_group import GenerationGroup
from relight.training.collectives.groups import Ranks
from relight.training.collectives.operations import Exchange, Operation
from relight.training.collectives.policy import CollectivePolicy
from relight.training.torch_private.autograd import RUN_BACKWARD, not_compiled
from relight.training.torch_private.distributed.groups import OPERATIONS, POINT_TO_POINT, make_detached_group
from relight.training.torch_private.script_modes import unseen


class GroupMaker(Protocol):
    """Makes the process groups of a job."""

    def make_group(self, members: Sequence[int], name: str, description: str | None) -> "RelightProcessGroup | None":
        """Return a group of these ranks; None if this process is no member."""


class RelightProcessGroup(dist.ProcessGroup):
    """Delegates every operation to the group of the current generation.

    `ranks` are its members: others, once a standby that holds it takes a rank. To a process that is no member it equals
    c10d's NON_GROUP_MEMBER, so c10d skips operations on it, and a script that looks for its own group passes it over.
    """

    def __init__(
        self,
        policy: CollectivePolicy,
        ranks: Ranks,
        device: torch.device,
        place: int = 0,
        maker: "GroupMaker | None" = None,
    ) -> None:
        """`place`: its number among all groups of the job. `maker`: makes the groups that c10d asks this one for."""
        super().__init__(ranks.index(policy.rank) if policy.rank in ranks else 0, len(ranks))  # type: ignore[call-arg]
        self._policy = policy
        self._maker = maker
        self._size = len(ranks)
        self._is_of_all = place == 0  # the default group
        self._device = device
        self._name = self._description = ""
        self.ranks = ranks
        self.place, self.built_as = place, policy.rank
        self.formed: GenerationGroup | None = None
        self.serves_reducer = False  # DDP's; then what C++ launches in a backward pass is a bucket of its

    def new_group(
        self, ranks: Sequence[int], *, group_name: str, group_desc: str | None = None, **_: Any
    ) -> "RelightProcessGroup | None":
        """c10d asks the default group for every group that a script makes, of whatever backend. None: no member."""
        assert self._maker is not None
        return self._maker.make_group(ranks, group_name, group_desc)

    @property
    def has_member(self) -> bool:
        """True if the rank that this process holds is a member."""
        return self._policy.rank in self.ranks

    def __eq__(self, other: object) -> bool:
        return self is other or (other == dist.GroupMember.NON_GROUP_MEMBER and not self.has_member)

    def __hash__(self) -> int:
        return id(self)

    def attach(self, formed: GenerationGroup) -> None:
        self.formed = formed

    def detach(self) -> None:
        """From now on operations complete at once, alone: for a standby, and while a recovery resets DDP."""
        if self.formed is not None:
            self.formed.retire()
        self.formed = GenerationGroup(make_detached_group(self._size - 1, self._size, self._device))

    @property
    def is_cut_off(self) -> bool:
        """True if a recovery has taken the peers of operations that cannot be repeated: a replacement calls none."""
        return not self._policy.is_protected() and (self._policy.closed or self._policy.after_recovery)

    def getBackendName(self) -> str:
        return "relight"

    def getRank(self) -> int:
        rank = self._policy.rank
        return self.ranks.index(rank) if rank in self.ranks else -1

    def getSize(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Any:  # noqa: ARG002
        """Torch 2.14 asks this for `supports_coalescing`: sends and receives of a batch are launched one by one."""
        return self

    # C++ keeps a name in the backends of a group, of which this one has none; DeviceMesh finds its groups by it.
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """A plain barrier, where `dist.monitored_barrier` is passed by: relight finds a rank that does not come."""
        dist.barrier(self)

    def _count_launch(self, operation: str) -> None:
        policy = self._policy
        policy.launches += 1
        policy.launches_of_all += self._is_of_all and operation not in POINT_TO_POINT

    @not_compiled
    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        # The backward passes of an accelerator run in threads of C++, where nothing of Python calls this.
        caller = sys._getframe().f_back
        if self.serves_reducer and caller is not None and caller.f_code is RUN_BACKWARD:
            policy, formed = self._policy, self.formed
            if formed is not None and not formed.is_detached and not policy.closed and policy.is_protected():
                policy.count_collective()
                self._count_launch("allreduce")
                return _reduce_bucket(formed, *args, **kwargs)
        return self._launch("allreduce", *args, **kwargs)

    @unseen
    def _launch(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        policy = self._policy
        assert self.formed is not None
        if self.formed.is_detached:
            rank = max(0, self.getRank())
            complete(operation, rank, self._size, (*args, *kwargs.values()))
            return _Done(args[0] if args else None, (rank + 1) % self._size)
        protected = policy.is_protected()
        if policy.closed and protected:
            raise StepInterrupted(f"{operation}: the generation was closed by a failure elsewhere")
        if not protected and policy.code_between.come(operation, (*args, *kwargs.values()), self._size):
            return _Done(args[0] if args else None)
        if self.is_cut_off:
            return self._cut(operation, args, kwargs)
        policy.count_collective()
        self._count_launch(operation)
        if protected:
            work = self.formed.launch(operation, *args, **kwargs)
            if isinstance(work, (Operation, Exchange)):
                work.report_to(policy)
            return work
        policy.unprotected(operation)
        try:
            work = self.formed.launch(operation, *args, **kwargs)
        except RuntimeError:
            if not policy.await_verdict():
                raise
            return self._cut(operation, args, kwargs)
        if isinstance(work, Exchange):
            work.report_to(policy)
        cuttable = _CuttableWork(
            work,
            policy,
            again=lambda: self._launch(operation, *args, **kwargs),
            alone=lambda: self._complete_alone(operation, args, kwargs),
        )
        policy.code_between.launched(cuttable)
        return cuttable

    def _cut(self, operation: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dist.Work:
        """Call an operation again once all ranks can come to it; or give it this rank's own values."""
        if self._policy.code_between.meet():
            again: dist.Work = self._launch(operation, *args, **kwargs)
            return again
        return self._complete_alone(operation, args, kwargs)

    def _complete_alone(self, operation: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dist.Work:
        self._policy.cut(operation)
        complete(operation, max(0, self.getRank()), self._size, (*args, *kwargs.values()))
        return _Done(args[0] if args else None)  # DDP's reducer takes its bucket from there


@unseen
def _reduce_bucket(formed: GenerationGroup, *args: Any, **kwargs: Any) -> Any:
    return formed.reduce_bucket(*args, **kwargs)


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

    def __init__(self, result: Any = None, source: int = 0) -> None:
        """`source`: the rank that something is said to be received from."""
        super().__init__()
        self._result = result
        self._source = source

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

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
    """An operation outside the protected part of a step: a recovery may cut it."""

    def __init__(
        self, work: dist.Work, policy: CollectivePolicy, again: Callable[[], dist.Work], alone: Callable[[], dist.Work]
    ) -> None:
        """`again` launches it once more, and `alone` gives it this rank's own values."""
        super().__init__()
        self._work = work
        self._policy = policy
        self._again = again
        self._alone = alone
        self._is_over = False

    def call_again(self) -> None:
        self._work = self._again()

    @not_compiled
    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            is_done = self._work.wait() if timeout is None or timeout.total_seconds() <= 0 else self._work.wait(timeout)
        except (RuntimeError, StepInterrupted):
            if not self._policy.await_verdict():
                raise
            if not self._policy.code_between.meet():
                self._work = self._alone()
            return self._work.wait()
        if not self._is_over:  # a second wait may come after the script has changed the result
            self._is_over = True
            self._policy.code_between.complete(self)
        return is_done

    @not_compiled
    def is_completed(self) -> bool:
        if self._work.is_completed():
            self.wait()  # it may have been cut: a script that asks this need not wait as well
            return True
        return False

    @not_compiled
    def get_future(self) -> Any:
        self._policy.code_between.took_future()
        return self._work.get_future()
