"""Backward passes, hooks of gradients, the compiler and the gradient scaler."""

import collections
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

# A number for the backward pass that this thread runs a node or a callback of; -1 if it runs none.
current_backward: Callable[[], int] = torch._C._current_graph_task_id

# What others set on an optimizer as it steps: a gradient scaler, and schedulers, which warn by it.
SET_BY_STEPS = ("grad_scale", "found_inf", "_opt_called")


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
    return only_inlined(function)


def only_inlined(function: _Function) -> _Function:
    """Have torch.compile look at this function only where compiled code calls it, and at no frame that it calls."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def is_compiled_transform() -> bool:
    """Return whether torch.compile is at code in a transform of torch.func, whose graph nothing may interrupt."""
    functorch: Any = torch._C._functorch
    # The compiler knows the class of this object; it takes `is not None` for true whatever it is.
    return torch.compiler.is_compiling() and isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter)


def at_backward(call: Callable[[], None]) -> Callable[[], None]:
    """Have every backward pass call this first, in the thread that starts it. Returns a function that undoes that.

    All of torch's own ways to start one go through this function, which torch.compiler replaces in the same way.
    A hook on the result of the model takes three times as long.
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
    """Return the table of hooks on a parameter's accumulated gradient; made, and kept forever, if there was none."""
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


def reset_scaler(scaler: torch.amp.GradScaler) -> None:
    """Undo an aborted step's use of the scaler; otherwise `unscale_` of the repeated step is refused as a second."""
    if scaler.is_enabled():  # else it has nothing to remember with
        scaler._per_optimizer_states.clear()
