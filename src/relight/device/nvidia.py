"""The health of this host's GPUs, through NVIDIA's management library: `pip install relight[gpu]`.

Without the library or without a GPU there is nothing to tell, and nothing is said about that either. What a device or
a container does not tell is left out.
"""

import collections
import contextlib
import importlib
import time
from collections.abc import Callable
from typing import Any

from relight.device.faults import LOST, memory_faults, xid_fault
from relight.device.visible import restricted_to
from relight.wire.status import Gpu

# What slows a device down though there is work: heat, a power brake, or its hardware by itself.
_SLOWDOWNS = ("HwSlowdown", "HwThermalSlowdown", "SwThermalSlowdown", "HwPowerBrakeSlowdown")


class Gpus:
    """The devices that workers of this agent may use, in the order in which they number them."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        # The second one: the driver is older than the library, and lacks this question.
        self._refusals = (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError))
        self._errors: dict[int, int] = {}  # uncorrected ones of each device, as it told last
        self._lost: set[int] = set()
        self._faults: collections.deque[str] = collections.deque()  # found, and not told yet
        self._numbers, self._events = self._register()
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
        gpus = tuple(self._sample(index, handle) for index, handle in enumerate(self._handles))
        self._faults.extend(memory_faults(self._errors, gpus))
        self._errors |= {gpu.index: gpu.uncorrected_errors for gpu in gpus if gpu.uncorrected_errors is not None}
        return gpus

    def next_fault(self, seconds: float) -> str:
        """Return the next fault that the last sample has found, or that the driver reports within this time, or ""."""
        deadline = time.monotonic() + seconds
        while not self._faults and (left := deadline - time.monotonic()) > 0:
            self._faults.extend(filter(None, [self._await_event(left)]))
        return self._faults.popleft() if self._faults else ""

    def _register(self) -> tuple[dict[Any, int], Any]:
        """Have the driver keep the errors of these devices for `_await_event`.

        Returns their numbers by their unique names, and the set of events; None: it keeps none.
        """
        nvml, numbers = self._nvml, dict[Any, int]()
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return {}, None
        for number, handle in enumerate(self._handles):
            with contextlib.suppress(nvml.NVMLError):  # a part of a device (MIG) reports none
                numbers[nvml.nvmlDeviceGetUUID(handle)] = number
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        return numbers, events

    def _await_event(self, seconds: float) -> str:
        nvml = self._nvml
        if self._events is None:
            time.sleep(seconds)
            return ""
        begun = time.monotonic()
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, max(1, int(1000 * seconds)))
            number = self._numbers.get(nvml.nvmlDeviceGetUUID(event.device))
        except nvml.NVMLError:  # the time is over, or the driver is in trouble: then it answers at once
            time.sleep(max(0.0, min(1.0, seconds - (time.monotonic() - begun))))
            return ""
        return "" if number is None else xid_fault(number, int(event.eventData))

    def _sample(self, index: int, handle: Any) -> Gpu:
        nvml = self._nvml
        name = self._ask(nvml.nvmlDeviceGetName, handle)
        self._note_if_lost(index, handle)
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

    def _note_if_lost(self, index: int, handle: Any) -> None:
        """Find a fault, once, if the driver has this device no more."""
        nvml = self._nvml
        try:
            nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_GPU_IS_LOST and index not in self._lost:
                self._lost.add(index)
                self._faults.append(f"GPU {index}: {LOST}")

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._refusals:  # this device does not tell
            return None


def _visible(count: int) -> list[str]:
    """Devices by number or UUID, as the environment restricts and orders them."""
    named = restricted_to()
    return [str(number) for number in range(count)] if named is None else named


def _handle(nvml: Any, device: str) -> Any:
    if device.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    return nvml.nvmlDeviceGetHandleByUUID(device)
