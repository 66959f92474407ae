"""`relight.init()`: join the job that `relight run` started."""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from relight.core.protocol.position import Phase
from relight.device.placement import place
from relight.device.visible import count_devices
from relight.errors import UsageError
from relight.training.ending import hook
from relight.training.process.runtime import Runtime, connect
from relight.training.process.stacks import answer_for_stacks
from relight.training.script_groups import BACKEND, ScriptGroups
from relight.training.state.values.kinds import OfProcess
from relight.training.torch_private.distributed.c10d import REFUSED_STORE
from relight.training.torch_private.distributed.ddp import watch_wrappers
from relight.training.torch_private.distributed.mesh import follow_rank, watch_skips
from relight.training.torch_private.installed import describe_installed
from relight.training.torch_private.scripted import optimize_from_the_first_call

_runtime: Runtime | None = None


class Job(OfProcess):
    """This process's membership in the job, as `relight.init` returns it.

    Read `rank` where it is needed instead of keeping a copy: a standby learns its rank only when it takes one over.

    Example::

        job = relight.init()
        model = DDP(Model().to(job.device))
        sampler = DistributedSampler(dataset, num_replicas=job.world_size, rank=job.rank)
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def rank(self) -> int:
        """Rank of this worker, from 0 to `world_size` - 1; provisional in a standby."""
        return self._runtime.rank

    @property
    def local_rank(self) -> int:
        """Rank on its node, as ranks are laid out when the job starts."""
        return self._runtime.local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks; it never changes."""
        return self._runtime.world_size

    @property
    def device(self) -> torch.device:
        """Device of this worker: put the model there."""
        return self._runtime.device

    @property
    def run_dir(self) -> Path:
        """Directory in which the job keeps its files (`relight run --run-dir`)."""
        return Path(self._runtime.settings.run_dir)

    @property
    def is_standby(self) -> bool:
        """True if this process has no rank yet."""
        return self._runtime.is_standby

    def on_rank_change(self, call: Callable[[int], None]) -> None:
        """Have `call(rank)` called when this process, a standby, takes a rank: for whatever has kept the rank.

        It is called on the main thread, before the state is restored and before the first step. `job.rank`,
        `torch.distributed.get_rank()`, the process groups, the samplers of the data and the variable RANK have the new
        rank by then. It may not call collectives. A process that knows its rank from the start never calls it.
        """
        self._runtime.at_rank_change.append(call)

    @property
    def generation(self) -> int:
        """Generation of the group of ranks: 1 until the first recovery, higher after each."""
        return self._runtime.generation


# A script that imports these gives ranks modules of different kinds.
_PIPELINES = "torch.distributed.pipelining"


def init(*, late_standby: bool | None = None) -> Job:
    """Form the process group of all ranks, and return this process's membership in the job.

    Call it once, before the model is built, instead of `torch.distributed.init_process_group`. Everything in
    `torch.distributed` works afterwards.

    Args:
        late_standby: if True, a standby waits in here until it takes over a rank, and builds its modules only then. A
            script needs this if ranks build different modules (the stages of a pipeline); a recovery then takes longer
            by the time that building takes. If False, a standby runs ahead to the first step. Default: None, which is
            True if `torch.distributed.pipelining` was imported before, and False otherwise.

    Returns:
        The `Job`, with `rank`, `world_size` and `device`.

    Raises:
        UsageError: the script was not started by `relight run`, `torch.distributed` is initialized already, `init` was
            called twice, or the installed torch lacks a private interface that relight needs.

    Example::

        import relight

        job = relight.init()
        model = DDP(Model().to(job.device))
    """
    global _runtime  # noqa: PLW0603 - one job per process, as c10d has one default group
    _refuse_wrong_start()
    other_version = describe_installed()
    optimize_from_the_first_call()
    runtime = connect()
    if runtime.settings.no_python:
        _look_after_itself(runtime)
    runtime.page.stamp(Phase.STARTING)
    if other_version and runtime.rank == 0 and not runtime.is_standby:
        runtime.notices.say("torch", other_version)
    runtime.guessed = late_standby is None and _PIPELINES in sys.modules
    _place(runtime, True if runtime.guessed else late_standby)
    _await_rank(runtime)
    _initialize_torch(runtime)
    _runtime = runtime
    return Job(runtime)


def joined() -> Runtime | None:
    """Return the runtime that `init` made in this process; None before."""
    return _runtime


def current_runtime() -> Runtime:
    """Return the runtime that `init` made in this process. Raises UsageError if there is none."""
    if _runtime is None:
        raise UsageError("call relight.init() before relight.Training(...)")
    return _runtime


def _refuse_wrong_start() -> None:
    """Raises UsageError unless this is the process that `relight run` started, and it has not joined yet."""
    if _runtime is not None:
        raise UsageError("relight.init() was called twice in one process")
    if "RELIGHT_PRIVATE_DIR" not in os.environ:
        raise UsageError(f"relight.init() found no job: {_how_to_start()}")
    if os.getsid(0) != os.getpid():  # the agent's child leads a session
        raise UsageError(
            "relight.init() was called in a child of the process that relight has started and watches. Call it in that "
            "process; a program that --no-python names must become Python (`exec python train.py` in a shell script)"
        )
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialized already: let relight.init() do it")


def _how_to_start() -> str:
    """Say how a script is started, where this process was not started by `relight run`."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return (
            "this is a process of Ray. A TorchTrainer, like verl, ends all its workers when one is lost, so none can "
            "be replaced there. Instead of TorchTrainer(...).fit(), call relight.integrations.ray.run('train.py', "
            "nodes=...) in the driver: it starts the script's ranks on hosts that Ray gives"
        )
    return "start the script with `relight run --nproc-per-node N script.py` instead of python or torchrun"


def _look_after_itself(runtime: Runtime) -> None:
    """Do what relight's own start of a script does, in a script that was started by another program."""
    hook(runtime)
    answer_for_stacks(Path(os.environ["RELIGHT_PRIVATE_DIR"]), runtime.process)


def _place(runtime: Runtime, late_standby: bool | None) -> None:
    """Decide on the devices of ranks and standbys, and on how their tensors travel."""
    settings = runtime.settings
    standbys = math.ceil(settings.standbys / settings.nodes)
    runtime.placement = place(
        runtime.accelerator.devices(), runtime.local_world_size, standbys, late_standby=late_standby
    )
    runtime.builds_late = runtime.placement.builds_late
    notice = runtime.placement.notice
    if runtime.accelerator.is_host and (idle := count_devices()):
        notice = (
            f"this host has {idle} NVIDIA devices and torch {torch.__version__} sees none, so the job runs on the CPU: "
            "install a torch with CUDA and a driver that fits it, or set CUDA_VISIBLE_DEVICES to nothing if this is "
            "what you want"
        )
    if notice and runtime.rank == 0 and not runtime.is_standby:
        runtime.notices.say("devices", notice)


def _await_rank(runtime: Runtime) -> None:
    """Wait for the rank that the controller assigns; not in a standby that builds its modules first."""
    if not runtime.is_standby:
        runtime.await_assignment()
    elif runtime.builds_late:
        runtime.stand_by(layout_digest="")
        if runtime.placement.has_own_collectives:  # that of the process which had the rank
            runtime.device = runtime.accelerator.device_of_slot(runtime.local_rank)
        runtime.page.stamp(Phase.STARTING)


def _initialize_torch(runtime: Runtime) -> None:
    """Make the default process group, and follow the script's use of torch.distributed."""
    groups = ScriptGroups(runtime)
    groups.register()
    runtime.accelerator.use(runtime.device)
    dist.init_process_group(BACKEND, store=REFUSED_STORE, rank=runtime.rank, world_size=runtime.world_size)
    groups.watch()
    watch_wrappers()
    if runtime.is_standby and not runtime.builds_late:
        follow_rank(runtime.rank)
        watch_skips(runtime.note_skip)
