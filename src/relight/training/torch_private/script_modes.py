"""Function and dispatch modes that a script has entered: they see no call of torch that relight makes.

A mode sees everything that its thread calls, also what hooks of relight call inside the script's block. After a
recovery these call other things than in an undisturbed run, so a mode that counts, or that draws random numbers, would
count otherwise. `torch.set_default_device` is a mode too, and stays: objects of the script make tensors in
`load_state_dict`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._device import DeviceContext

from relight.training.torch_private.autograd import not_compiled

_functions: Callable[[], int] = torch._C._len_torch_function_stack
_dispatches: Callable[[], int] = torch._C._len_torch_dispatch_stack
_dispatch: Any = torch.utils._python_dispatch

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Hidden:
    """All modes are off in here but default devices."""

    def __enter__(self) -> None:
        functions = _pop_functions()
        self._functions = [mode for mode in functions if not isinstance(mode, DeviceContext)]
        _push_functions([mode for mode in functions if isinstance(mode, DeviceContext)])
        self._dispatches = [_dispatch._pop_mode() for _ in range(_dispatches())]

    def __exit__(self, *_: object) -> None:
        for mode in reversed(self._dispatches):
            _dispatch._push_mode(mode)
        _push_functions(self._functions)  # a default device lies below, also one that was set in here


def _pop_functions() -> list[Any]:
    """Leave all function modes. Returns them, the innermost first."""
    return [torch._C._pop_torch_function_stack() for _ in range(_functions())]


def _push_functions(modes: Sequence[Any]) -> None:
    for mode in reversed(modes):
        torch._C._push_on_torch_function_stack(mode)


_NOTHING = contextlib.nullcontext()


def hidden_from_modes() -> contextlib.AbstractContextManager[None]:
    """Return a context in which modes of the script see nothing."""
    return _Hidden() if _functions() or _dispatches() else _NOTHING


def unseen(function: _Function) -> _Function:
    """Have modes of the script see nothing of what a function calls."""

    @not_compiled
    @functools.wraps(function)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        if _functions() or _dispatches():
            with _Hidden():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return hidden  # type: ignore[return-value]


Modes = tuple[tuple[Any, ...], tuple[Any, ...]]
_NO_MODES: Modes = ((), ())


def modes_now() -> Modes:
    """The function and dispatch modes that this thread is in, the innermost last; of a default device that device."""
    if not (_functions() or _dispatches()):
        return _NO_MODES
    functions: list[Any] = [torch._C._get_function_stack_at(place) for place in range(_functions())]
    return (
        tuple(mode.device if isinstance(mode, DeviceContext) else mode for mode in functions),
        tuple(torch._C._get_dispatch_stack_at(place) for place in range(_dispatches())),
    )


def default_context() -> Any:
    """Return the context of `torch.set_default_device` in this thread, another one after each call; None: none yet."""
    return torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context")  # `getattr` takes 1 us where there is none


def default_device() -> torch.device | None:
    """The one that `torch.set_default_device` has set in this thread."""
    context = default_context()
    return None if context is None else context.device


def sees_calls() -> bool:
    """Return whether the script is in a mode that is more than a default device."""
    functions, dispatches = modes_now()
    return bool(dispatches) or not all(isinstance(mode, torch.device) for mode in functions)


def return_to(modes: Modes) -> None:
    """Leave the modes that were entered since `modes_now` returned these, and enter those that were left.

    Default devices stay: they are a setting (`TorchSettings`).
    """
    if modes_now() == modes:
        return
    devices = [mode for mode in _pop_functions() if isinstance(mode, DeviceContext)]
    while _dispatches():
        _dispatch._pop_mode()
    functions, dispatches = modes
    _push_functions(devices)
    _push_functions([mode for mode in reversed(functions) if not isinstance(mode, torch.device)])
    for mode in dispatches:
        _dispatch._push_mode(mode)


def names_of_modes(one: Modes, other: Modes) -> str:
    """Names of the modes that are only in one of two results of `modes_now`, in alphabetical order."""
    kinds = (type(mode) for left, right in zip(one, other, strict=True) for mode in {*left} ^ {*right})
    return ", ".join(sorted({"a default device" if k is torch.device else k.__qualname__ for k in kinds}))
