"""GPUs' health. Without a GPU only what is asked, and what is made of the answers, can be tested; see the last test."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from relight.device.nvidia import Gpus
from relight.wire.status import Gpu


class Refusal(Exception):
    """The library's exception."""


def library(**answers: Any) -> Any:
    """NVIDIA's library with one device, of which it tells only `answers`."""

    def refuse(*_: Any) -> Any:
        raise Refusal

    names = {
        *("Name", "UtilizationRates", "MemoryInfo", "PowerUsage", "Temperature", "TotalEccErrors"),
        *("CurrentClocksThrottleReasons", "ComputeRunningProcesses"),
    }
    made = {f"nvmlDeviceGet{name}": refuse for name in names}
    made |= {f"nvmlDeviceGet{name}": lambda *_, value=value: value for name, value in answers.items()}
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlEventSetCreate=refuse,
        NVML_ERROR_GPU_IS_LOST=15,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        NVMLError=Refusal,
        NVML_TEMPERATURE_GPU=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlClocksThrottleReasonHwSlowdown=8,
        nvmlClocksThrottleReasonSwThermalSlowdown=32,
        **made,
    )


def found(nvml: Any) -> tuple[Gpu, ...]:
    gpus = Gpus.find(nvml)
    assert gpus is not None
    return gpus.sample()


def test_what_a_device_tells() -> None:
    nvml = library(
        Name=b"H200",
        UtilizationRates=SimpleNamespace(gpu=97),
        MemoryInfo=SimpleNamespace(used=3 * 2**30, total=141 * 2**30),
        PowerUsage=350_500,
        Temperature=61,
        TotalEccErrors=2,
        CurrentClocksThrottleReasons=32 | 1,
        ComputeRunningProcesses=[SimpleNamespace(pid=7), SimpleNamespace(pid=8)],
    )
    assert found(nvml) == (
        Gpu(
            index=0,
            name="H200",
            busy_share=0.97,
            memory_used_bytes=3 * 2**30,
            memory_total_bytes=141 * 2**30,
            temperature_celsius=61,
            power_watts=350.5,
            uncorrected_errors=2,
            slowed=True,
            pids=(7, 8),
        ),
    )


def test_what_a_device_does_not_tell_is_left_out() -> None:
    assert found(library(Temperature=40)) == (Gpu(index=0, temperature_celsius=40),)
    assert found(library(CurrentClocksThrottleReasons=1)) == (Gpu(index=0, slowed=False),)  # it is idle


def test_devices_are_numbered_as_workers_number_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = library()
    nvml.nvmlDeviceGetCount = lambda: 4
    nvml.nvmlDeviceGetName = lambda handle: f"device {handle}"
    assert [gpu.name for gpu in found(nvml)] == ["device 0", "device 1", "device 2", "device 3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, GPU-abc")
    assert [(gpu.index, gpu.name) for gpu in found(nvml)] == [(0, "device 2"), (1, "device GPU-abc")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Gpus.find(nvml) is None


def test_no_driver_is_no_error() -> None:
    def no_driver() -> None:
        raise Refusal("Driver Not Loaded")

    nvml = library()
    nvml.nvmlInit = no_driver
    assert Gpus.find(nvml) is None


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("pynvml") is None, reason="needs relight[gpu]")
def test_a_real_device() -> None:
    (gpu, *_) = found(None)
    assert gpu.name
    assert gpu.memory_total_bytes is not None
    assert gpu.memory_total_bytes > 2**30
    assert gpu.busy_share is None or 0 <= gpu.busy_share <= 1
    assert gpu.temperature_celsius is None or 0 < gpu.temperature_celsius < 120
