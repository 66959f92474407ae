"""Settings of torch as a whole that a step may change: gradients enabled, default type, threads, kernels.

A step that was interrupted between `torch.set_default_dtype(torch.float64)` and the way back would be repeated with it.
Weights that autocast has cast are forgotten at the beginning of each step: those that `set_autocast_enabled` leaves
in torch's cache are of an older step, and a replacement would not have them.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from relight.device.torch_private import FLAG_READERS, backend_flags, set_backend_flags
from relight.training.torch_private.script_modes import default_context, default_device


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


def _anomalies() -> list[bool]:
    return [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]


def _autocast(kind: str) -> list[Any]:
    return [torch.is_autocast_enabled(kind), _name(torch.get_autocast_dtype(kind))]


def _set_autocast(kinds: dict[str, list[Any]]) -> None:
    for kind, (is_enabled, name) in kinds.items():
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, _dtype(name))


# Read and set by the thread that trains. Values can be written down.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomalies": (_anomalies, lambda found: torch.autograd.set_detect_anomaly(*found)),
    "autocast": (lambda: {kind: _autocast(kind) for kind in _kinds()}, _set_autocast),
    "device": (lambda: _text(default_device()), torch.set_default_device),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "dtype": (lambda: _name(torch.get_default_dtype()), lambda name: torch.set_default_dtype(_dtype(name))),
    "flags": (backend_flags, set_backend_flags),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
}
_SHARED = ("anomalies", "dtype", "flags", "deterministic")  # whichever thread asks


def _readers(names: Sequence[str]) -> list[Callable[[], Any]]:
    """Functions of C++, most of them, that read what these settings are made of: each is called in every step."""
    by_kind = (torch.is_autocast_enabled, torch.get_autocast_dtype)
    made_of: dict[str, Sequence[Callable[[], Any]]] = {
        "anomalies": (torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled),
        "autocast": [functools.partial(read, kind) for kind in _kinds() for read in by_kind],
        "device": (default_context,),
        "dtype": (torch.get_default_dtype,),
        "flags": FLAG_READERS,
    }
    return [read for name in names for read in made_of.get(name, SETTINGS[name][:1])]


class _Reading:
    """Settings as they were when they were read last: the same object for as long as they are the same."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._read: list[Callable[[], Any]] = []
        self._seen: list[Any] | None = None
        self._values: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        """Return their values by name, not to be changed."""
        try:
            self._read = self._read or _readers(self._names)
            seen = list(map(operator.call, self._read))
        except RuntimeError:
            seen = None
        if seen is None or seen != self._seen:
            self._values = {name: SETTINGS[name][0]() for name in self._names}
            self._seen = seen
        return self._values


_shared = _Reading(*_SHARED)
of_thread = _Reading(*(name for name in SETTINGS if name not in _SHARED))


_MOVED = (
    "{names}: changed between two steps, and a rank was lost there: its replacement may train without the change. "
    "Change them inside the block"
)


class TorchSettings:
    """Those at the beginning of the step under way."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._after: dict[str, Any] = {}  # those that all threads share, as the last step left them
        self._now: dict[str, Any] = {}  # the same, if no code of the script has run since

    def begin(self) -> None:
        """Begin a step."""
        self._before = of_thread.now() | (self._now or _shared.now())
        self._now = {}
        torch.clear_autocast_cache()

    def commit(self) -> None:
        """The step counts."""
        self._now, self._after = {}, _shared.now()

    def moved(self) -> str | None:
        """Return why a rank that was lost since the last step ended lacks a change, if there was one; once."""
        before = self._after
        self._after = self._now = _shared.now() if before else {}
        if before is self._after:
            return None
        names = sorted(f"torch's {name}" for name, value in before.items() if self._after[name] != value)
        return _MOVED.format(names=", ".join(names)) if names else None

    def roll_back(self) -> None:
        """Make them what they were when the step began."""
        adopt_settings(self._before)
        torch.clear_autocast_cache()


def shared_settings() -> dict[str, Any]:
    """Return the settings that a replacement needs to adopt."""
    return _shared.now()


def adopt_settings(values: dict[str, Any]) -> None:
    """Set those that differ."""
    for name, value in values.items():
        read, change = SETTINGS[name]
        if read() != value:
            change(value)
