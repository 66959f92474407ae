"""DistributedDataParallel: wrappers, the layout of buckets, and broadcasts of buffers."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_comm_hook as register_comm_hook
from torch.nn.parallel import DistributedDataParallel

_made: list[weakref.ref[Any]] = []
# Parameters that took gradients as the wrapper was made: of these it reduces the gradients, frozen later or not.
_reduced: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
# How its parameters lay in memory then: gradients lie so in its buckets.
_strides: weakref.WeakKeyDictionary[Any, list[list[int]]] = weakref.WeakKeyDictionary()


def watch_wrappers() -> None:
    """Remember every DDP wrapper that is made from now on."""
    original: Any = DistributedDataParallel.__init__

    @functools.wraps(original)
    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _made.append(weakref.ref(self))
        _reduced[self] = [parameter for parameter in self._module_parameters if parameter.requires_grad]
        _strides[self] = strides_in(self)

    DistributedDataParallel.__init__ = remember  # type: ignore[method-assign]


def wrappers_made() -> list[Any]:
    """Return the DDP wrappers that still exist, in the order of their making, which is the same on all ranks."""
    return [wrapper for made in _made if (wrapper := made()) is not None]


# Of a parameter: why it is not trained alike on all ranks.
NOT_REDUCED = (
    "{} was frozen when DDP wrapped its model, so DDP does not average its gradients: each rank would update it by its "
    "own, with relight or without. Wrap the model while everything that will ever train takes gradients "
    "(DDP(model, find_unused_parameters=True)), and freeze after that"
)


def unreduced() -> dict[int, str]:
    """Return names of parameters, by `id`, that were wrapped and are averaged by no wrapper: they were frozen then."""
    wrappers = [one for one in wrappers_made() if one in _reduced and dist.get_world_size(one.process_group) > 1]
    reduced = {id(parameter) for wrapper in wrappers for parameter in _reduced[wrapper]}
    wrapped = {id(parameter) for wrapper in wrappers for parameter in wrapper._module_parameters}
    named = (pair for wrapper in wrappers for pair in wrapper.module.named_parameters())
    return {id(one): name for name, one in named if id(one) in wrapped and id(one) not in reduced}


Buckets = list[list[int]]  # numbers of the parameters in each, in the order of their reduction


class BucketLayout:
    """Keeps a DDP's gradient buckets the same on every rank, through aborted steps and replacements.

    DDP starts with buckets in parameter order, and rebuilds them once, in the order in which gradients became ready in
    its first backward pass. Another layout is another summation order, so it must never depend on failures. The
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
        self._built = _strides.get(ddp) or strides_in(ddp)
        self._rebuilt = strides_in(ddp)  # when the buckets were rebuilt
        # Parameters whose gradients are views of buckets, and could leave these with another memory format.
        views = enumerate(ddp._module_parameters) if ddp.gradient_as_bucket_view else ()
        self._formatted = [(index, parameter) for index, parameter in views if parameter.ndim > _MATRIX]
        if self._fixed:
            self._ddp.reducer = _FixedReducer(ddp.reducer)
        elif ddp._has_rebuilt_buckets:  # the script has trained before the loop
            self._known = (0, rebuilt_buckets(ddp))

    def describe(self, version: int) -> list[Any] | None:
        """The layout of that version, for `adopt`; None if it is the initial one."""
        if self._known is None or self._known[0] > version:
            return None
        return [*self._known, self._rebuilt] if self._rebuilt != self._built else list(self._known)

    def adopt(self, described: list[Any] | None) -> None:
        """Take on the layout that another rank has described."""
        known = None if described is None else (int(described[0]), [list(bucket) for bucket in described[1]])
        more = [] if described is None else described[2:]
        rebuilt = [list(strides) for strides in more[0]] if more else self._built
        if self._fixed or (known == self._known and (known is None or rebuilt == self._rebuilt)):
            return
        self._known, self._rebuilt = known, rebuilt
        self._make_reducer()

    def begin_step(self, version: int) -> None:
        """Every attempt of the step that changes `version` begins with the same reducer.

        Its first forward pass broadcasts buffers from rank 0, on every rank or on none. DDP decides it by the forward
        pass before: after one inside `no_sync`, or without gradients, the next one does not. That pass may be one of an
        aborted attempt, which other ranks never came to, or one that a replacement has not seen; ranks that decide
        differently wait for each other forever.
        """
        vars(self._ddp)["require_forward_param_sync"] = True  # a module's own way to set an attribute takes 30 us
        if self._known is None or self._known[0] > version:
            self._back_to_initial()
        elif isinstance(self._ddp.reducer, _FixedReducer):
            self._ddp.reducer._reset_state()  # or it adds to the order that it noted in the last step

    def settle(self, version: int) -> None:
        """All gradients of the step that changes `version` are reduced: if they were the first ones, rebuild.

        DDP would do so in its next forward pass, which is of a later step. The ranks take rank 0's order.
        """
        self._check_formats()
        if self._fixed or self._known is not None:
            return
        try:
            rebuilt = self._ddp.reducer._rebuild_buckets()
        except RuntimeError as error:
            if not str(error).startswith(_UNFINISHED):  # some parameter had no part in the loss: DDP will say so itself
                raise
            return
        if rebuilt or self._ddp._has_rebuilt_buckets:
            self._known, self._rebuilt = (version + 1, rebuilt_buckets(self._ddp)), strides_in(self._ddp)

    def _check_formats(self) -> None:
        """Raise RuntimeError if gradients that were views of buckets no longer are, since their memory format changed.

        `Module.to` takes them out of their buckets, which keep the gradients of the step before.
        """
        laid_out = self._built if self._known is None else self._rebuilt
        for index, parameter in self._formatted:
            if parameter.grad is not None and list(parameter.grad.stride()) != laid_out[index]:
                name = next(name for name, other in self._ddp.module.named_parameters() if other is parameter)
                raise RuntimeError(_FORMAT_CHANGED.format(name))

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
        """Return to the initial layout, whatever an attempt of a step has done."""
        if self._known is not None or self._ddp._has_rebuilt_buckets:
            self._known = None
            self._make_reducer()
        else:
            self._ddp.reducer._reset_state()

    def _make_reducer(self) -> None:
        """Make a new reducer, in its first iteration, with the known layout. No other way forgets an earlier layout."""
        ddp, is_static = self._ddp, self._ddp.static_graph
        ddp.reducer._remove_autograd_hooks()
        strides = self._built if self._known is None else self._rebuilt
        with _taking_gradients_as_made(ddp), _laid_out_as_made(ddp, strides):
            parameters, sparse = _reducible_as_made(ddp)
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


_MATRIX = 2  # dimensions
_FORMAT_CHANGED = (
    "relight: the memory format of {} and its gradient changed after its model was wrapped in "
    "DDP(gradient_as_bucket_view=True), which then averages old gradients, with relight or without. Call "
    "model.to(memory_format=...) before you wrap the model, or optimizer.zero_grad() before it"
)
_USUAL_SAMPLE_RATE = 100
_UNFINISHED = "Expected to have finished reduction in the prior iteration"


def rebuilt_buckets(ddp: Any) -> Buckets:
    """Return the buckets that the reducer has just rebuilt; only its logger knows them."""
    ddp._set_ddp_runtime_logging_sample_rate(1)  # it logs only in some iterations
    ddp.logger.set_runtime_stats_and_log()
    ddp._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE)
    logged = ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
    return [[int(number) for number in bucket.split()] for bucket in logged.split(",")]


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


def _reducible_as_made(ddp: Any) -> tuple[list[Any], list[bool]]:
    """Return the parameters to reduce, in the order as made, and which are sparse: steps may have pruned modules since.

    A wrapper that was made around a module without buffers goes on broadcasting none.
    """
    buffers = ddp.modules_buffers
    parameters, sparse = ddp._build_params_for_reducer()
    if not buffers:
        ddp.modules_buffers = buffers
    places = {id(parameter): place for place, parameter in enumerate(_reduced.get(ddp, ()))}
    pairs = sorted(zip(parameters, sparse, strict=True), key=lambda pair: places.get(id(pair[0]), len(places)))
    return [parameter for parameter, _ in pairs], [is_sparse for _, is_sparse in pairs]


def strides_in(ddp: Any) -> list[list[int]]:
    """Return the strides of each parameter."""
    return [list(parameter.stride()) for parameter in ddp._module_parameters]


@contextlib.contextmanager
def _laid_out_as_made(ddp: Any, strides: list[list[int]]) -> Iterator[None]:
    """The parameters have these strides: steps may have changed their memory format, and buckets stay as they were."""
    own = []
    for parameter, wanted in zip(ddp._module_parameters, strides, strict=True):
        if list(parameter.stride()) != wanted:
            own.append((parameter, parameter.detach()))
            with torch.no_grad():
                parameter.data = parameter.new_empty_strided(parameter.shape, wanted)
    try:
        yield
    finally:
        for parameter, data in own:
            parameter.data = data


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
    """DDP's reducer without the rebuilding of its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer
        self.prepare_for_forward = reducer.prepare_for_forward  # called in every step
        self.prepare_for_backward = reducer.prepare_for_backward

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)
