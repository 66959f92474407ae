"""Every private interface of torch that relight leans on, in one place. Checked on torch 2.13.0.

tests/training/test_torch_private.py exercises each against the installed version, so that an upgrade that moves
one of them fails there, by name, and not in somebody's recovery.
"""

from collections.abc import Callable
from datetime import timedelta
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch._C._distributed_c10d import _register_comm_hook as register_comm_hook
from torch.distributed import ProcessGroup

from relight.wire.settings import host_address

# The operations of a process group, by the names of 2.13 and of older versions; those that exist are delegated.
_OPERATIONS = (
    "allreduce allreduce_coalesced broadcast reduce allgather _allgather_base all_gather_single allgather_coalesced "
    "allgather_into_tensor_coalesced all_gather_single_coalesced gather scatter reduce_scatter _reduce_scatter_base "
    "reduce_scatter_single reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced all_to_all_single "
    "alltoall_base alltoall send recv recv_anysource barrier"
).split()
REDUCE_SCATTERS = frozenset(
    "_reduce_scatter_base reduce_scatter_single reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced".split()
)
POINT_TO_POINT = frozenset(("send", "recv", "recv_anysource"))
# A hung peer is the controller's business: it knows who hangs, and Stop ends the wait. Collectives never time out.
_COLLECTIVE_TIMEOUT = timedelta(days=7)
_FORMING_TIMEOUT = timedelta(seconds=60)
OPERATIONS = tuple(name for name in _OPERATIONS if hasattr(ProcessGroup, name))


def make_inner_group(store: Store, rank: int, size: int, name: str, cuda: torch.device | None) -> ProcessGroup:
    """A real process group: gloo for CPU tensors, NCCL too where a CUDA device is given. Blocks until formed."""
    group = ProcessGroup(store, rank, size)
    gloo = _make_gloo(store, rank, size)
    gloo._set_default_timeout(_COLLECTIVE_TIMEOUT)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    if cuda is not None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _COLLECTIVE_TIMEOUT
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        group._register_backend(cuda, ProcessGroup.BackendType.NCCL, nccl)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group


def cpu_backend(group: ProcessGroup) -> Any:
    """What reduces CPU tensors in there. It takes the group's calls, without torch's dispatcher in between."""
    return group._get_backend(torch.device("cpu"))


def _make_gloo(store: Store, rank: int, size: int) -> dist.ProcessGroupGloo:
    """Listens at this host's address if it has one, so that other hosts reach it; else where torch chooses."""
    address = host_address()
    gloo_group: Any = dist.ProcessGroupGloo
    if not address:
        return dist.ProcessGroupGloo(store, rank, size, _FORMING_TIMEOUT)
    options = gloo_group._Options()
    options._timeout = _FORMING_TIMEOUT
    options._devices = [gloo_group.create_device(hostname=address)]
    group: dist.ProcessGroupGloo = gloo_group(store, rank, size, options)
    return group


def make_detached_group(rank: int, size: int, device: torch.device) -> ProcessGroup:
    """A group of `size` whose operations complete at once without a peer: what a standby builds and warms up on."""
    fake = torch._C._distributed_c10d.FakeProcessGroup._create_internal(rank, size)
    group = ProcessGroup(HashStore(), rank, size)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, fake)
    if device.type != "cpu":
        group._register_backend(device, ProcessGroup.BackendType.CUSTOM, fake)
    group._set_group_name("relight-detached")  # type: ignore[arg-type]
    return group


def abort_nccl(group: ProcessGroup, device: torch.device) -> None:
    """Make NCCL operations of this group fail at once. Not run on this project's CI, which has no GPU."""
    group._get_backend(device).abort()


# A number for the backward pass that this thread runs a node or a callback of; -1 if it runs none.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have the present backward pass call this when it has computed all gradients, after what was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


# Runs a backward pass: if a function's caller has this code, then C++ has called the function in such a pass. Hooks of
# Python have frames of their own in between. The passes of a GPU run in threads without any frame.
RUN_BACKWARD: CodeType = torch.autograd.graph._engine_run_backward.__code__


_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_compiled(function: _Function) -> _Function:
    """Have torch.compile leave this function, and whatever it calls, to the interpreter.

    Around a compiled model it looks at every frame, also at those that its hooks and DDP's reducer enter. Done by hand,
    since torch.compiler.disable would import the compiler into every script.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # where a compiled frame calls it
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def at_backward(call: Callable[[], None]) -> Callable[[], None]:
    """Have every backward pass call this first, in the thread that asked for it. What is returned undoes that.

    All of torch's own ways to start one go through this function, which torch.compiler replaces in the same way.
    Telling it by a hook on what the model returns takes three times as long.
    """
    started: Any = torch.autograd.graph._engine_run_backward

    @not_compiled
    def start(*args: Any, **kwargs: Any) -> Any:
        call()
        return started(*args, **kwargs)

    def put(function: Any) -> None:
        torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = function  # type: ignore[attr-defined]

    put(start)
    return lambda: put(started)


class BucketLayout:
    """Keeps DDP's gradient buckets the same on every rank, through aborted steps and replacements.

    DDP starts with buckets in parameter order and rebuilds them after its first iteration, in the order in which
    gradients became ready. Another layout is another summation order, so it must never depend on who failed when:
    step 0 uses the initial layout, every later step the rebuilt one. `reset` sees to it, and clears what an
    exception in the middle of forward or backward left behind in the reducer.
    """

    def __init__(self, ddp: Any, *, fixed: bool = False) -> None:
        """`ddp` is a DistributedDataParallel; if `fixed`, the initial layout is kept for the whole job.

        A replacement knows the rebuilt layout from its rehearsal, and in a pipeline there is none: a stage alone has no
        input. With `find_unused_parameters` DDP itself rebuilds nothing. With `static_graph` the order is that of its
        first iteration, which a survivor cannot go through again.
        """
        self._ddp = ddp
        self._rebuilt = False
        self._fixed = fixed or ddp.find_unused_parameters or ddp.static_graph
        if self._fixed:
            self._ddp.reducer = _FixedReducer(ddp.reducer)

    @property
    def is_fixed(self) -> bool:
        """Whether the initial layout is kept."""
        return self._fixed

    def begin_step(self) -> None:
        """Have the first forward pass of a step broadcast buffers from rank 0, on every rank or on none.

        DDP decides it by the forward pass before: after one inside `no_sync`, or without gradients, the next one does
        not. That pass may be one of an aborted attempt, which other ranks never came to, or one that a replacement
        has not seen; ranks that decide differently wait for each other for ever.
        """
        vars(self._ddp)["require_forward_param_sync"] = True  # a module's own way to set an attribute takes 30 us
        if self._fixed:
            self._ddp.reducer._reset_state()  # it has noted the order of the last step, and would go on and on

    def reset(self, target_version: int) -> None:
        """Make the reducer ready for the step after `target_version`. The group must be detached meanwhile."""
        if self._ddp.static_graph:
            self._make_reducer()
            return
        reducer = self._ddp.reducer
        if target_version > 0 and not self._rebuilt and not self._ddp._has_rebuilt_buckets and not self._fixed:
            # The gradients of step 0 have all been ready once, so the order is known; a peer's broadcast of the
            # same order may have been cut short by the failure.
            reducer._rebuild_buckets()
        self._rebuilt = self._rebuilt or target_version > 0
        self._ddp._has_rebuilt_buckets = False
        reducer._reset_state()

    def _make_reducer(self) -> None:
        """A new one, in its first iteration: nothing else forgets how often an aborted one saw each parameter."""
        ddp = self._ddp
        ddp.reducer._remove_autograd_hooks()
        parameters, sparse = ddp._build_params_for_reducer()
        ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), True)
        ddp.static_graph = False
        ddp._set_static_graph()
        for hook, state in ddp._comm_hooks:
            register_comm_hook(ddp.reducer, state, hook)
        ddp.reducer = _FixedReducer(ddp.reducer)


def stateful_hooks(module: Any) -> list[Any]:
    """States of DDP's communication hooks that change from step to step (PowerSGD's error, a local optimizer's)."""
    hooks = getattr(module, "_comm_hooks", [])
    return [state for _, state in hooks if type(state).__module__.startswith(_HOOKS_WITH_STATE)]


_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
_HOOKS_WITH_STATE = (f"{_HOOKS}.powerSGD_hook", f"{_HOOKS}.post_localSGD_hook")


class _FixedReducer:
    """DDP's reducer, but for the rebuilding of its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def reset_scaler(scaler: torch.amp.GradScaler) -> None:
    """Forget what an aborted step did with the scaler; otherwise the redo's unscale_ is refused as a second one."""
    if scaler.is_enabled():  # else it has nothing to remember with
        scaler._per_optimizer_states.clear()
