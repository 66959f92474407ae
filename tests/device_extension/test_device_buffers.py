"""Buckets in the late device's own memory: written there by a source, imported there by engines in other processes."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import relight

pytestmark = pytest.mark.late
late = pytest.importorskip("tests.device_extension.late", reason="not built: make test-device", exc_type=ImportError)

from relight.errors import TransferError  # noqa: E402 - the device is chosen once, when it is there
from relight.transfer.io.messages import Begin  # noqa: E402
from relight.transfer.plan.plan import plan_buckets  # noqa: E402
from relight.transfer.plan.update.result import Published  # noqa: E402
from relight.transfer.plan.update.way import Way  # noqa: E402
from relight.transfer.tensors import device_buffers  # noqa: E402
from relight.transfer.tensors.device import CopyStreams  # noqa: E402
from relight.transfer.tensors.device_buffers import DeviceBuffers, ImportedBuffers, SourceOnDevice  # noqa: E402
from relight.transfer.tensors.device_staging import DeviceStaging  # noqa: E402
from relight.transfer.tensors.targets import StagedTensors  # noqa: E402
from relight.transfer.tensors.weights import TensorSource  # noqa: E402
from tests.device_extension.peer import serve  # noqa: E402

SECONDS = 60.0
BUCKET_BYTES = 2**15
SHAPES: dict[str, tuple[int, ...]] = {"a": (150, 160), "odd": (3,), "b": (40_001,), "one": ()}
NOTHING = lambda *_: None  # noqa: E731
NO_EVENTS = lambda _: lambda: None  # noqa: E731


class Engine:
    """An engine on a device, in a process of its own."""

    def __init__(self, place: Path, device: int) -> None:
        self._own, others = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process: BaseProcess = context.Process(target=serve, args=(others, place, SHAPES, device), daemon=True)
        self.process.start()
        others.close()

    def has(self, version: int) -> tuple[bool, dict[str, torch.Tensor], list[str], list[str]]:
        self._own.send(version)
        assert self._own.poll(SECONDS)
        found: tuple[bool, dict[str, torch.Tensor], list[str], list[str]] = self._own.recv()
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[relight.Publisher, Callable[..., Engine]]]:
    """A publisher, and a function that starts an engine on a device; all ends with the test."""
    engines: list[Engine] = []

    def start(device: int = 0) -> Engine:
        engines.append(Engine(tmp_path, device))
        return engines[-1]

    with relight.Publisher(tmp_path, bucket_bytes=BUCKET_BYTES) as publisher:
        try:
            yield publisher, start
        finally:
            for engine in engines:
                engine.close()
    torch.accelerator.synchronize(0)


def computed(value: float) -> dict[str, torch.Tensor]:
    """Tensors that are still being computed."""
    found = {name: torch.zeros(shape, device="late") for name, shape in SHAPES.items()}
    for tensor in found.values():
        for _ in range(5):
            tensor.add_(value / 10)
        tensor.fill_(value)
    found["a"] = torch.full((160, 150), value, device="late").t()  # does not lie side by side
    return found


def publish(publisher: relight.Publisher, source: SourceOnDevice, version: int) -> Published:
    result = publisher.begin(source, version=version).wait(SECONDS)
    assert result is not None
    return result


def assert_has(engine: Engine, version: int, value: float) -> None:
    arrived, held, races, notices = engine.has(version)
    assert arrived, notices
    assert all(bool((tensor == value).all()) for tensor in held.values()), held
    assert races == []


@pytest.mark.parametrize("devices", [(0, 0), (1, 1), (0, 1, 2)], ids=["the source's", "another", "several"])
def test_engines_in_other_processes_get_what_was_computed(place: Any, devices: tuple[int, ...]) -> None:
    publisher, start = place
    engines = [start(device) for device in devices]
    assert publisher.wait_for_engines(len(devices), SECONDS)
    buffers = DeviceBuffers(torch.device("late", 0), BUCKET_BYTES)
    for version in range(1, 6):
        result = publish(publisher, SourceOnDevice(computed(float(version)), buffers), version)
        assert (result.way, result.dropped, result.error) == (Way.ON_DEVICE, {}, "")
        assert result.buckets > 4
        for engine in engines:
            assert_has(engine, version, float(version))
    assert late.native.races() == []


def test_an_engine_in_host_memory_gets_shared_buffers(place: Any, tmp_path: Path) -> None:
    publisher, start = place
    engine = start()
    with relight.Receiver(tmp_path, model={name: torch.zeros(shape) for name, shape in SHAPES.items()}) as receiver:
        assert publisher.wait_for_engines(2, SECONDS)
        buffers = DeviceBuffers(torch.device("late", 0), BUCKET_BYTES)
        result = publish(publisher, SourceOnDevice(computed(1.0), buffers), 1)
        assert (result.way, result.dropped, result.error) == (Way.COPIED, {}, "")
        assert "it takes weights into host memory, and not on late:0" in result.why
        assert receiver.wait_for(1, SECONDS)
        assert_has(engine, 1, 1.0)
    assert late.native.races() == []


def test_a_full_device_is_left_to_its_trainer(place: Any) -> None:
    """Each process that uses a device takes some of its memory: engines on other devices take host memory instead."""
    publisher, start = place
    near, far = start(0), start(1)
    assert publisher.wait_for_engines(2, SECONDS)
    late.native.set_memory_limit(2**31)
    try:
        buffers = DeviceBuffers(torch.device("late", 0), BUCKET_BYTES)
        result = publish(publisher, SourceOnDevice(computed(1.0), buffers), 1)
    finally:
        late.native.set_memory_limit(2**33)
    assert (result.way, result.dropped, result.error) == (Way.COPIED, {}, "")
    assert re.search(r"lie on another device, and only 2\.0 GiB are free on late:0", result.why), result.why
    for engine in (near, far):
        assert_has(engine, 1, 1.0)


def test_why_an_engine_does_without_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = DeviceBuffers(torch.device("late", 0), BUCKET_BYTES)
    source = SourceOnDevice(computed(1.0), buffers)
    live = {name: torch.zeros(shape, device="late:1") for name, shape in SHAPES.items()}
    begin = Begin(
        update=1, version=1, generation=1, bucket_bytes=BUCKET_BYTES, manifest=source.manifest, handles=source.handles
    )

    def why(live: dict[str, torch.Tensor], device: str = source.device) -> str:
        return StagedTensors(live).import_buffers(msgspec.structs.replace(begin, device=device))

    assert why(live) == ""
    assert why(live, "late:99") == "it does not see late:99, where the weights are"
    assert why({**live, "one": torch.zeros((), device="late:2")}) == "its weights lie on several devices"
    monkeypatch.setattr(torch.get_device_module("late"), "can_device_access_peer", lambda *_: False, raising=False)
    assert why(live) == "late:1, where its weights lie, cannot read the memory of late:0 by itself"
    late.native.set_memory_limit(late.native.allocated_bytes(1))
    try:
        monkeypatch.undo()
        begin = msgspec.structs.replace(begin, bucket_bytes=2**20)
        assert re.match(r"no room on late:1 for a bucket of 1\.0 MiB: ", why(live))
    finally:
        late.native.set_memory_limit(2**33)


def test_a_killed_engine_is_dropped_and_the_other_goes_on(place: Any) -> None:
    publisher, start = place
    kept, lost = start(0), start(1)
    assert publisher.wait_for_engines(2, SECONDS)
    buffers = DeviceBuffers(torch.device("late", 0), BUCKET_BYTES)
    assert not publish(publisher, SourceOnDevice(computed(1.0), buffers), 1).dropped

    class Killing(SourceOnDevice):
        def place(self, bucket: Any, buffer: int) -> int:
            if bucket.index == 2:
                assert lost.process.pid is not None
                signal.pidfd_send_signal(os.pidfd_open(lost.process.pid), signal.SIGKILL)
                lost.process.join(SECONDS)
            return super().place(bucket, buffer)

    result = publish(publisher, Killing(computed(2.0), buffers), 2)
    assert (result.way, len(result.engines), len(result.dropped)) == (Way.ON_DEVICE, 1, 1)
    assert_has(kept, 2, 2.0)
    assert late.native.races() == []


@pytest.mark.parametrize("device", [0, 1])
def test_values_that_change_in_the_buffer_are_noticed(place: Any, device: int) -> None:
    """The digest is computed by devices: the source's as it is written, the engine's as it has come."""
    publisher, start = place
    engine = start(device)
    assert publisher.wait_for_engines(1, SECONDS)
    buffers = DeviceBuffers(torch.device("late", 0), BUCKET_BYTES)

    class Flipping(SourceOnDevice):
        left = 1

        def place(self, bucket: Any, buffer: int) -> int:
            digest = super().place(bucket, buffer)
            if bucket.index == 1 and self.left:
                self.left -= 1
                buffers._tensors[buffer][77:78].add_(1)
                torch.accelerator.synchronize(0)
            return digest

    result = publish(publisher, Flipping(computed(3.0), buffers), 1)
    assert not result.error
    assert len([s for s in result.stages if s.kind == "reload" and s.bucket == 1]) == 3
    assert_has(engine, 1, 3.0)


def test_one_flipped_bit_has_another_digest() -> None:
    values = torch.randint(0, 256, (3 * 2**19 + 24,), dtype=torch.uint8)
    seen = {device_buffers._digest(device_buffers._sums(values))}
    for place in (0, 7, 2**19, 3 * 2**19 + 23):
        for bit in (1, 128):
            values[place] ^= bit
            seen.add(device_buffers._digest(device_buffers._sums(values)))
            values[place] ^= bit
    assert len(seen) == 9
    assert device_buffers._digest(device_buffers._sums(values.to("late"))) in seen


def test_what_cannot_be_exported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransferError, match="cannot be exported"):
        DeviceBuffers(torch.device("cpu"))
    device = torch.device("late", 0)
    with pytest.raises(TransferError, match="cannot be imported on late:0: process 4194305, whose memory was exported"):
        ImportedBuffers([late._EXPORTED.pack(2**22 + 1, 3, 0, 4096)], device, device, 4096)
    late.native.set_memory_limit(2**20)
    try:
        with pytest.raises(TransferError, match=r"no buffers of 32\.0 MiB on late:0"):
            DeviceBuffers(torch.device("late", 0))
    finally:
        late.native.set_memory_limit(2**33)


# --- planted bugs -------------------------------------------------------------------------------------------------
Plant = Callable[[pytest.MonkeyPatch], None]


def write_and_load(
    before_writing: Plant, before_loading: Plant, patch: pytest.MonkeyPatch, place: torch.device
) -> list[str]:
    """Put a bucket into a buffer and take it out again, onto `place`, in one process; return the races."""
    device = torch.device("late", 0)
    source = {"a": torch.full((9000,), 1.0, device=device)}
    staging = DeviceStaging(TensorSource(source).manifest, {"a": torch.zeros(9000, device=place)})
    used = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    for index in (0, 1):
        torch.accelerator.synchronize(index)
    del used  # the memory that the buffers get
    before_writing(patch)
    buffers = DeviceBuffers(device, BUCKET_BYTES)
    on_device = SourceOnDevice(source, buffers)
    bucket = plan_buckets(on_device.manifest, BUCKET_BYTES)[0]
    digest = on_device.place(bucket, 0)
    imported = ImportedBuffers(buffers.handles, device, place, BUCKET_BYTES)
    before_loading(patch)
    arrived = staging.load_on_device(bucket, imported, 0)
    for index in (0, 1):
        torch.accelerator.synchronize(index)
    races: list[str] = late.native.races()
    assert races or digest == arrived
    return races


def no_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CopyStreams, "mark", NO_EVENTS)


@pytest.mark.parametrize(
    ("before_writing", "before_loading"),
    [
        pytest.param(NOTHING, NOTHING, id="none"),
        pytest.param(no_events, NOTHING, id="a bucket is announced before it is there"),
        pytest.param(NOTHING, no_events, id="a buffer is given back while it is read"),
    ],
)
@pytest.mark.parametrize("device", [0, 1])
def test_a_wait_that_is_left_out_is_reported(
    monkeypatch: pytest.MonkeyPatch, before_writing: Plant, before_loading: Plant, device: int
) -> None:
    races = write_and_load(before_writing, before_loading, monkeypatch, torch.device("late", device))
    assert bool(races) == (before_writing is not NOTHING or before_loading is not NOTHING), races
