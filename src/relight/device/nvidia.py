"""The health of this host's GPUs, for people, through NVIDIA's management library: `pip install relight[gpu]`.

Without the library or without a GPU there is nothing to tell, and nothing is said about that either. What a device or
a container does not tell is left out.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from relight.device.visible import restricted_to
from relight.wire.status import Gpu

# What slows a device down though there is work: heat, a power brake, or its hardware by itself.
_SLOWDOWNS = ("HwSlowdown", "HwThermalSlowdown", "SwThermalSlowdown", "HwPowerBrakeSlowdown")


class Gpus:
    """The devices that workers of this agent may use, in the order in which they number them."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self._slowdowns = sum(int(getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)) for name in _SLOWDOWNS)

    @classmethod
    def find(cls, nvml: Any = None) -> "Gpus | None":
        """None: there are none, or they cannot be asked. `nvml`: the library, by default pynvml."""
        try:
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # not installed, or no driver: every kind of machine without a GPU
            return None
        with contextlib.suppress(nvml.NVMLError, ValueError):
            handles = [_handle(nvml, device) for device in _visible(nvml.nvmlDeviceGetCount())]
            if handles:
                return cls(nvml, handles)
        return None

    def sample(self) -> tuple[Gpu, ...]:
        """Return the state of each device. May take some milliseconds, and longer with a device in trouble."""
        return tuple(self._sample(index, handle) for index, handle in enumerate(self._handles))

    def _sample(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        name = self._ask(nvml.nvmlDeviceGetName, handle)
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        celsius = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        errors = self._ask(
            nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return Gpu(
            index=index,
            name=name.decode() if isinstance(name, bytes) else str(name or ""),
            busy_share=None if busy is None else busy.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_celsius=None if celsius is None else int(celsius),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            uncorrected_errors=None if errors is None else int(errors),
            slowed=None if reasons is None else bool(int(reasons) & self._slowdowns),
            pids=tuple(int(process.pid) for process in processes or ()),
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:  # this device does not tell
            return None


def _visible(count: int) -> list[str]:
    """Devices by number or UUID, as the environment restricts and orders them."""
    named = restricted_to()
    return [str(number) for number in range(count)] if named is None else named


def _handle(nvml: Any, device: str) -> Any:
    if device.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    return nvml.nvmlDeviceGetHandleByUUID(device)
