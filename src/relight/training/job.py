"""`relight.init()`: join the job that `relight run` started."""

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from relight.core.commands import Assign
from relight.core.position import Phase
from relight.errors import RestoreError, StepInterrupted, UsageError
from relight.training.collectives.generation_group import GenerationGroup
from relight.training.collectives.group import RelightProcessGroup
from relight.training.collectives.groups import Ranks
from relight.training.ending import hook
from relight.training.process.runtime import Runtime, Superseded, connect
from relight.training.process.stacks import answer_for_stacks
from relight.training.torch_private.c10d import REFUSED_STORE, adapt
from relight.training.torch_private.ddp import watch_wrappers
from relight.training.torch_private.installed import check_installed
from relight.training.torch_private.mesh import follow_rank, watch_groups, watch_skips

_runtime: Runtime | None = None


class Job:
    """This process's place in the job.

    Read `rank` where you need it instead of copying it: a standby learns its rank only when it takes one.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def rank(self) -> int:
        """This worker's rank; provisional in a standby."""
        return self._runtime.rank

    @property
    def local_rank(self) -> int:
        """The rank on this node, as ranks are laid out at the start."""
        return self._runtime.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks; it never changes."""
        return self._runtime.world_size

    @property
    def device(self) -> torch.device:
        """The device for the model."""
        return self._runtime.device

    @property
    def is_standby(self) -> bool:
        """Whether this process has no rank yet."""
        return self._runtime.is_standby

    @property
    def generation(self) -> int:
        """The current generation: 1 until the first recovery."""
        return self._runtime.generation


# A script that imports these gives ranks modules of different kinds.
_PIPELINES = "torch.distributed.pipelining"


def init(*, late_standby: bool | None = None) -> Job:
    """Form the process group and return this process's place in the job.

    Call it once, before the model is built, instead of `torch.distributed.init_process_group`. Everything in
    `torch.distributed` works afterwards.

    Args:
        late_standby: True: a standby waits in this call until it is given a rank, and builds its modules only then.
            Necessary where ranks build different modules (the stages of a pipeline); recoveries take longer by the time
            for building. False: a standby runs ahead to the first step, and takes a rank by one message.
            None: True if torch.distributed.pipelining was imported before.

    Raises:
        UsageError: the script was not started by `relight run`.
    """
    global _runtime  # noqa: PLW0603 - one job per process, as c10d has one default group
    if _runtime is not None:
        raise UsageError("relight.init() was called twice in one process")
    if "RELIGHT_PRIVATE_DIR" not in os.environ:
        raise UsageError(
            "relight.init() found no job: start the script with `relight run --nproc-per-node N script.py` "
            "instead of python or torchrun"
        )
    if os.getsid(0) != os.getpid():  # the agent's child leads a session
        raise UsageError(
            "relight.init() was called in a child of the process that relight has started and watches. Call it in that "
            "process; a program that --no-python names must become Python (`exec python train.py` in a shell script)"
        )
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialized already: let relight.init() do it")
    other_version = check_installed()
    runtime = connect()
    if runtime.settings.no_python:
        _look_after_itself(runtime)
    runtime.page.stamp(Phase.STARTING)
    if other_version and runtime.rank == 0 and not runtime.is_standby:
        runtime.say("torch", other_version)
    runtime.guessed = late_standby is None
    runtime.builds_late = _PIPELINES in sys.modules if late_standby is None else late_standby

    def create(options: Any, _: Any = None) -> RelightProcessGroup:
        group = _create_group(runtime, runtime.table.normal(options.global_ranks_in_group), 0)
        group.make_group = functools.partial(_make_group, runtime)
        return group

    dist.Backend.register_backend("relight", create, extended_api=True, devices=["cpu", "cuda"])
    if runtime.is_standby:
        if runtime.builds_late:
            runtime.stand_by(layout_digest="")
            runtime.page.stamp(Phase.STARTING)
    else:
        order = runtime.await_order(Assign)
        runtime.take_assignment(order.generation, order.rank)
    if runtime.device.type == "cuda":
        torch.cuda.set_device(runtime.device)
    dist.init_process_group("relight", store=REFUSED_STORE, rank=runtime.rank, world_size=runtime.world_size)
    adapt(_is_own, _is_detached)
    watch_wrappers()
    watch_groups(lambda ranks, members_only: runtime.table.add(ranks, members_only=members_only))
    if runtime.is_standby and not runtime.builds_late:
        follow_rank(runtime.rank)
        watch_skips(runtime.note_skip)
    _runtime = runtime
    return Job(runtime)


def _look_after_itself(runtime: Runtime) -> None:
    """What relight's own start of a script does, for one that was started by another program."""
    hook(runtime)
    answer_for_stacks(Path(os.environ["RELIGHT_PRIVATE_DIR"]), runtime.process)


def _is_own(group: Any) -> bool:
    return isinstance(group, RelightProcessGroup)


def _is_detached(group: Any) -> bool:
    return isinstance(group, RelightProcessGroup) and group.formed is not None and group.formed.is_detached


def _create_group(runtime: Runtime, ranks: Ranks, place: int) -> RelightProcessGroup:
    group = RelightProcessGroup(runtime, lambda: runtime.rank, ranks, runtime.device, place)
    same = next((other.formed for other in runtime.groups if other.ranks == ranks), None)
    if runtime.is_standby:
        group.detach()
    elif same is not None:
        group.attach(same)
    else:
        group.attach(_form(runtime, ranks))
    runtime.groups.append(group)
    return group


def _form(runtime: Runtime, ranks: Ranks) -> GenerationGroup:
    """A formed group. Raises StepInterrupted if a failure elsewhere was the cause, RestoreError if none is told of."""
    forming = runtime.begin_forming(runtime.generation, [ranks])
    interrupted = StepInterrupted("a peer failed while a process group was formed with it")
    try:
        return runtime.await_formed(forming, runtime.generation)[ranks]
    except Superseded:
        raise interrupted from None
    except RestoreError as error:
        if runtime.await_stop(str(error)):
            raise interrupted from error
        raise


def _make_group(runtime: Runtime, members: Sequence[int], name: str, description: str | None) -> Any:
    """`dist.new_group`: a standby that may take any rank holds every group, others those that they are in."""
    ranks = runtime.table.normal(members)
    takes_any = runtime.is_standby and not runtime.builds_late
    if runtime.rank not in ranks and not takes_any:
        return None
    group = _create_group(runtime, ranks, runtime.table.newest)
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc("undefined" if description is None else description)
    return group


def current_runtime() -> Runtime:
    """The runtime that `init` made. Raises UsageError if there is none."""
    if _runtime is None:
        raise UsageError("call relight.init() before relight.Training(...)")
    return _runtime
