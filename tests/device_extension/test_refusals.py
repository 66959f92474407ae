"""Devices that are full or refuse: each case is a sentence, and weights arrive where a slower way exists."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.late
late = pytest.importorskip("tests.device_extension.late", reason="not built: make test-device", exc_type=ImportError)

from relight.device.choose import accelerator  # noqa: E402 - the device is chosen once, when it is there
from relight.device.placement import place  # noqa: E402
from relight.errors import TransferError, UsageError  # noqa: E402
from relight.transfer.io.buffers import Buffer  # noqa: E402
from relight.transfer.tensors.device_buffers import DeviceBuffers, ImportedBuffers  # noqa: E402
from relight.transfer.tensors.device_staging import DeviceStaging  # noqa: E402
from relight.transfer.tensors.weights import TensorSource  # noqa: E402

Break = Callable[[pytest.MonkeyPatch], None]
MIB = 2**20


def refuse(*_: object) -> None:
    raise RuntimeError("not permitted in this container")


def full(_: pytest.MonkeyPatch) -> None:
    late.native.set_memory_limit(late.native.allocated_bytes(0))


def module_has(name: str, value: object) -> Break:
    return lambda patch: patch.setattr(torch.get_device_module("late"), name, value)


def make_buffers() -> DeviceBuffers:
    return DeviceBuffers(torch.device("late", 0), MIB)


def import_buffers() -> ImportedBuffers:
    return ImportedBuffers([b"a handle"], torch.device("late", 0), torch.device("late", 0), MIB)


def stage() -> DeviceStaging:
    live = {"a": torch.zeros(MIB)}
    return DeviceStaging(TensorSource(live).manifest, {"a": torch.empty(0, device="late")})


def two_ranks_on_one_device() -> object:
    return place(accelerator().devices(), 9, 0, late_standby=None)


def without_collectives() -> object:
    devices = accelerator().devices()
    assert devices.backend_name == "late_ccl"
    return place(type(devices)(devices.count, devices.type, devices.has_gloo, None), 2, 0, late_standby=None)


CASES: dict[str, tuple[Break, Callable[[], Any], type[Exception], str]] = {
    "a full device, buffers": (full, make_buffers, TransferError, r"no buffers of 1\.0 MiB on late:0: .*out of memory"),
    "a full device, a second copy": (full, stage, TransferError, r"no room on late:0 .* give the Receiver staging="),
    "no export in this driver": (
        module_has("export_memory", lambda _: None),
        make_buffers,
        TransferError,
        "memory of late:0 cannot be exported to other processes",
    ),
    "an export that is refused": (
        module_has("export_memory", refuse),
        make_buffers,
        TransferError,
        r"no buffers of 1\.0 MiB on late:0: not permitted in this container",
    ),
    "an import that is refused": (
        module_has("import_memory", refuse),
        import_buffers,
        TransferError,
        "cannot be imported on late:0: not permitted in this container",
    ),
    "two ranks on one device": (
        lambda _: None,
        two_ranks_on_one_device,
        UsageError,
        r"9 ranks and 0 standbys have 8 devices of type 'late'.* Start fewer, or use a machine with 9 devices",
    ),
    "a torch without collectives": (
        lambda _: None,
        without_collectives,
        UsageError,
        "torch has no collectives for devices of type 'late' here: import the package that registers them before",
    ),
}


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    yield
    late.native.set_memory_limit(2**33)


@pytest.mark.parametrize("case", CASES)
def test_each_is_a_sentence(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    spoil, act, kind, sentence = CASES[case]
    spoil(monkeypatch)
    with pytest.raises(kind, match=sentence):
        act()


def test_memory_that_cannot_be_registered_is_used_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.get_device_module("late"), "host_register", refuse)
    with pytest.warns(RuntimeWarning, match=r"4096 bytes of host memory .* the late device: not permitted.*ulimit -l"):
        buffer = Buffer.create(4096)
    try:
        values = torch.frombuffer(buffer.view, dtype=torch.uint8)
        values.copy_(torch.full((4096,), 7, dtype=torch.uint8, device="late"))
        assert bool((values == 7).all())
        del values
    finally:
        buffer.close()
