"""Settings of torch as a whole that a step may change: gradients enabled, default type, precision, threads.

A step that was interrupted between `torch.set_default_dtype(torch.float64)` and the way back would be repeated with it.
Weights that autocast has cast are forgotten at the beginning of each step: those that `set_autocast_enabled` leaves
in torch's cache are of an older step, and a replacement would not have them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from relight.training.torch_private.script_modes import default_device


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


_name = functools.cache(str)


def _text(device: torch.device | None) -> str | None:
    return None if device is None else str(device)


@functools.cache
def _kinds() -> tuple[str, ...]:
    """The kinds of devices that a step may compute on."""
    kind = torch.accelerator.current_accelerator()
    return ("cpu",) if kind is None else ("cpu", kind.type)


def _autocast(kind: str) -> list[Any]:
    return [torch.is_autocast_enabled(kind), _name(torch.get_autocast_dtype(kind))]


def _set_autocast(kinds: dict[str, list[Any]]) -> None:
    for kind, (is_enabled, name) in kinds.items():
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, _dtype(name))


# Read and set by the thread that trains. Values can be written down.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (lambda: {kind: _autocast(kind) for kind in _kinds()}, _set_autocast),
    "device": (lambda: _text(default_device()), torch.set_default_device),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "dtype": (lambda: _name(torch.get_default_dtype()), lambda name: torch.set_default_dtype(_dtype(name))),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
}
_SHARED = ("dtype", "precision", "deterministic")  # whichever thread asks


class TorchSettings:
    """Those at the beginning of the step under way."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._before = {name: read() for name, (read, _) in SETTINGS.items()}
        torch.clear_autocast_cache()

    def roll_back(self) -> None:
        """Make them what they were when the step began."""
        adopt_settings(self._before)
        torch.clear_autocast_cache()


def shared_settings() -> dict[str, Any]:
    """Return the settings that a replacement needs to adopt."""
    return {name: SETTINGS[name][0]() for name in _SHARED}


def adopt_settings(values: dict[str, Any]) -> None:
    """Set those that differ."""
    for name, value in values.items():
        read, change = SETTINGS[name]
        if read() != value:
            change(value)
