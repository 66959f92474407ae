"""Every private interface of torch that relight leans on, in one place. Checked on torch 2.13.0.

tests/training/test_torch_private.py exercises each against the installed version, so that an upgrade that moves
one of them fails there, by name, and not in somebody's recovery.
"""

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch._C._distributed_c10d import _register_comm_hook as register_comm_hook
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from relight.wire.loopback import IPV4, handed_down
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
    address = host_address() or (handed_down() if handed_down() != IPV4 else "")
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


def gradient_hooks(parameter: Any) -> dict[int, Any]:
    """What is called when the gradient of this parameter is accumulated; made for ever if there was nothing before."""
    if parameter._post_accumulate_grad_hooks is None:
        parameter._post_accumulate_grad_hooks = collections.OrderedDict()
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    return hooks


def put_hook(parameter: Any, call: Callable[[Any], None]) -> RemovableHandle:
    """As `register_post_accumulate_grad_hook`, also for a parameter that requires no gradient at present."""
    hooks = gradient_hooks(parameter)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = call
    return handle


_made: list[weakref.ref[Any]] = []
# Parameters that took gradients as the wrapper was made: of these it reduces the gradients, frozen later or not.
_reduced: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def watch_wrappers() -> None:
    """Remember every DDP wrapper that is made from now on."""
    original: Any = DistributedDataParallel.__init__

    @functools.wraps(original)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _made.append(weakref.ref(self))
        _reduced[self] = [parameter for parameter in self._module_parameters if parameter.requires_grad]

    DistributedDataParallel.__init__ = remember  # type: ignore[method-assign]


def wrappers_made() -> list[Any]:
    """Those that there still are, in the order of their making, which is the same on all ranks."""
    return [wrapper for made in _made if (wrapper := made()) is not None]


Buckets = list[list[int]]  # numbers of the parameters in each, in the order of their reduction


class BucketLayout:
    """Keeps a DDP's gradient buckets the same on every rank, through aborted steps and replacements.

    DDP starts with buckets in parameter order, and rebuilds them once, in the order in which gradients became ready in
    its first backward pass. Another layout is another summation order, so it must never depend on who failed when. The
    layout is therefore part of the state: `settle` makes it known in front of the barrier of the step in which the
    wrapper was first used, whichever that is, and a step that is undone undoes it.
    """

    def __init__(self, ddp: Any, *, fixed: bool = False) -> None:
        """`ddp` is a DistributedDataParallel; if `fixed`, the initial layout is kept for the whole job.

        With `find_unused_parameters` DDP itself rebuilds nothing. With `static_graph` it does so at another time. A
        stage of a pipeline keeps its own.
        """
        self._ddp = ddp
        self._fixed = fixed or ddp.find_unused_parameters or ddp.static_graph
        self._known: tuple[int, Buckets] | None = None  # the version that has the rebuilt layout first, and the layout
        if self._fixed:
            self._ddp.reducer = _FixedReducer(ddp.reducer)
        elif ddp._has_rebuilt_buckets:  # the script has trained before the loop
            self._known = (0, rebuilt_buckets(ddp))

    def describe(self, version: int) -> list[Any] | None:
        """The layout of that version, for `adopt`; None if it is the initial one."""
        return list(self._known) if self._known is not None and self._known[0] <= version else None

    def adopt(self, described: list[Any] | None) -> None:
        """Take on the layout that another rank has described."""
        known = None if described is None else (int(described[0]), [list(bucket) for bucket in described[1]])
        if known == self._known or self._fixed:
            return
        self._known = known
        self._make_reducer()

    def begin_step(self, version: int) -> None:
        """Every attempt of the step that changes `version` begins with the same reducer.

        Its first forward pass broadcasts buffers from rank 0, on every rank or on none. DDP decides it by the forward
        pass before: after one inside `no_sync`, or without gradients, the next one does not. That pass may be one of an
        aborted attempt, which other ranks never came to, or one that a replacement has not seen; ranks that decide
        differently wait for each other for ever.
        """
        vars(self._ddp)["require_forward_param_sync"] = True  # a module's own way to set an attribute takes 30 us
        if self._known is None or self._known[0] > version:
            self._back_to_initial()
        elif isinstance(self._ddp.reducer, _FixedReducer):
            self._ddp.reducer._reset_state()  # it has noted the order of the last step, and would go on and on

    def settle(self, version: int) -> None:
        """All gradients of the step that changes `version` are reduced: if they were the first ones, rebuild.

        DDP would do so in its next forward pass, which is of a later step. The ranks take rank 0's order.
        """
        if self._fixed or self._known is not None:
            return
        try:
            rebuilt = self._ddp.reducer._rebuild_buckets()
        except RuntimeError as error:
            if not str(error).startswith(_UNFINISHED):  # some parameter had no part in the loss: DDP will say so itself
                raise
            return
        if rebuilt or self._ddp._has_rebuilt_buckets:
            self._known = (version + 1, rebuilt_buckets(self._ddp))

    def reset(self, version: int) -> None:
        """Make the reducer ready for the step that changes `version`, after one that ended in its middle."""
        if self._known is not None and self._known[0] > version:
            self._known = None
            self._make_reducer()
        elif self._ddp.static_graph:  # nothing else forgets how often an aborted iteration saw each parameter
            self._make_reducer()
        elif self._known is None:
            self._back_to_initial()
        else:
            if not isinstance(self._ddp.reducer, _FixedReducer):  # or it would rebuild once more
                self._ddp.reducer = _FixedReducer(self._ddp.reducer)
            self._ddp.reducer._reset_state()

    def _back_to_initial(self) -> None:
        """Whatever an attempt of a step has made of it."""
        if self._known is not None or self._ddp._has_rebuilt_buckets:
            self._known = None
            self._make_reducer()
        else:
            self._ddp.reducer._reset_state()

    def _make_reducer(self) -> None:
        """A new one, in its first iteration, with the layout that is known: nothing else forgets another."""
        ddp, is_static = self._ddp, self._ddp.static_graph
        ddp.reducer._remove_autograd_hooks()
        with _taking_gradients_as_made(ddp):
            parameters, sparse = ddp._build_params_for_reducer()
            names = ddp._build_debug_param_to_name_mapping(parameters)
            with _buckets_given(self._known[1]) if self._known is not None else contextlib.nullcontext():
                ddp._ddp_init_helper(parameters, sparse, names, is_static)
        if is_static:
            ddp.static_graph = False
            ddp._set_static_graph()
        if ddp.mixed_precision is not None:
            ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
        for hook, state in ddp._comm_hooks:
            register_comm_hook(ddp.reducer, state, hook)
        ddp._has_rebuilt_buckets = False
        if self._fixed or self._known is not None:
            ddp.reducer = _FixedReducer(ddp.reducer)


_USUAL_SAMPLE_RATE = 100
_UNFINISHED = "Expected to have finished reduction in the prior iteration"


def rebuilt_buckets(ddp: Any) -> Buckets:
    """What the reducer has just rebuilt; it tells its logger alone."""
    ddp._set_ddp_runtime_logging_sample_rate(1)  # it tells so only in some iterations
    ddp.logger.set_runtime_stats_and_log()
    ddp._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE)
    told = ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    return [[int(number) for number in bucket.split()] for bucket in told.split(",")]


@contextlib.contextmanager
def _taking_gradients_as_made(ddp: Any) -> Iterator[None]:
    """The parameters that took gradients when the wrapper was made do so: a step may have frozen some, or all."""
    reduced = {id(parameter) for parameter in _reduced.get(ddp, ())}
    before = [(parameter, parameter.requires_grad) for parameter in ddp._module_parameters] if reduced else []
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in reduced)
        yield
    finally:
        for parameter, took in before:
            parameter.requires_grad_(took)


@contextlib.contextmanager
def _buckets_given(buckets: Buckets) -> Iterator[None]:
    """Have DDP make a reducer with these buckets instead of computing some."""
    module: Any = dist
    compute = module._compute_bucket_assignment_by_size

    def given(parameters: Any, limits: Any, *_: Any) -> Any:
        del parameters
        return buckets[::-1], [limits[-1]] * len(buckets)  # DDP turns them round; limits are only logged

    module._compute_bucket_assignment_by_size = given
    try:
        yield
    finally:
        module._compute_bucket_assignment_by_size = compute


def around_buffer_sync(ddp: Any, before: Callable[[], Any], after: Callable[[Any], None]) -> Callable[[], None]:
    """Have a DDP call these around its broadcast of buffers; `after` gets the result of `before`. Returns an undo."""
    sync = ddp._sync_buffers

    def synced() -> None:
        seen = before()
        sync()
        after(seen)

    vars(ddp)["_sync_buffers"] = synced
    return lambda: vars(ddp).pop("_sync_buffers", None)


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
        self.prepare_for_forward = reducer.prepare_for_forward  # called in every step
        self.prepare_for_backward = reducer.prepare_for_backward

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def reset_scaler(scaler: torch.amp.GradScaler) -> None:
    """Forget what an aborted step did with the scaler; otherwise the redo's unscale_ is refused as a second one."""
    if scaler.is_enabled():  # else it has nothing to remember with
        scaler._per_optimizer_states.clear()
