"""Weights from one process to engines on the same device, each a process of its own: relight beside other designs.

All ways use the same processes and tensors, in turns. A way's time begins when the sender begins, and ends when the
last engine's device has the weights in the tensors that it computes with. The others' designs are programmed here:
neither takes a digest, and both write into the tensors in use, so that an engine has to stop meanwhile.
"""

import multiprocessing
import statistics
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

import relight
from relight.device.choose import accelerator
from relight.transfer.tensors.device_buffers import DeviceBuffers, SourceOnDevice

MIB = 2**20
GIB = 2**30
DEADLINE_S = 120.0
BUCKET_BYTES = 256 * MIB
NAMES = {
    "relight": "relight: buckets in device memory, digests, a second copy in each engine, exchanged at the end",
    "relight-host": "relight: the same by way of pinned host memory",
    "ipc-buckets": "two exported buffers in turns, no digest, in place (the design of checkpoint-engine)",
    "ipc-tensors": "a handle for each tensor, no digest, in place (the design of vLLM's IPC engine)",
    "limit": "each engine copies as many bytes on the device",
}
HIDDEN, FEED = 4096, 11008


class Update(NamedTuple):
    """One order to an engine."""

    way: str
    version: int
    handles: list[bytes]


def shapes_of(gib: float) -> dict[str, tuple[int, ...]]:
    """Layers of a model in bfloat16, as many as fit."""
    found: dict[str, tuple[int, ...]] = {}
    layer, left = 0, gib * GIB / 2
    kinds = {"attention": (4 * HIDDEN, HIDDEN), "up": (2 * FEED, HIDDEN), "down": (HIDDEN, FEED), "norm": (HIDDEN,)}
    while True:
        for name, shape in kinds.items():
            left -= torch.Size(shape).numel()
            if left < 0 and found:
                return found
            found[f"layers.{layer}.{name}"] = shape
        layer += 1


def make(gib: float, *, random: bool) -> dict[str, torch.Tensor]:
    """The tensors on the device: of random bits, or of zeros."""
    device = accelerator().device_of_slot(0)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes_of(gib).items()}
    if random:
        for tensor in tensors.values():
            tensor.view(torch.int16).random_(-(2**15), 2**15)
    return tensors


def checksum(tensors: dict[str, torch.Tensor]) -> int:
    """Cheap, and enough to notice weights that did not arrive."""
    return sum(int(tensor.view(torch.int16).flatten()[::997].long().sum()) for tensor in tensors.values())


def buckets_of(tensors: dict[str, torch.Tensor], limit: int) -> list[list[tuple[torch.Tensor, int, int]]]:
    """Pieces of tensors as bytes: each with where it begins, and how long it is; as many as `limit` bytes a bucket."""
    found: list[list[tuple[torch.Tensor, int, int]]] = [[]]
    room = limit
    for tensor in tensors.values():
        start, flat = 0, tensor.view(-1).view(torch.uint8)
        while start < len(flat):
            if not room:
                found.append([])
                room = limit
            count = min(room, len(flat) - start)
            found[-1].append((flat, start, count))
            start, room = start + count, room - count
    return found


def serve(link: Connection, place: str, gib: float) -> None:
    """Be an engine."""
    try:
        _serve(link, place, gib)
    except BaseException:
        link.send(traceback.format_exc())
        raise


def _serve(link: Connection, place: str, gib: float) -> None:
    kind, live = accelerator(), make(gib, random=False)
    device = kind.device_of_slot(0)
    other = {name: torch.empty_like(tensor) for name, tensor in live.items()} if link.recv() else {}
    imported: list[torch.Tensor] = []
    with relight.Receiver(place, model=live) as receiver:
        link.send("ready")
        while (update := link.recv()) is not None:
            link.send("go")
            match update.way:
                case "relight" | "relight-host":
                    assert receiver.wait_for(update.version, DEADLINE_S)
                case "ipc-buckets":
                    imported = imported or [kind.import_memory(handle, device) for handle in update.handles]
                    _take_buckets(link, live, imported)
                case "ipc-tensors":
                    for tensor, handle in zip(live.values(), update.handles, strict=True):
                        tensor.view(-1).view(torch.uint8).copy_(kind.import_memory(handle, device))
                case "limit":
                    source = other or live
                    for name, tensor in live.items():
                        (tensor if other else torch.empty_like(tensor)).copy_(source[name])
            kind.synchronize(device)
            link.send((time.monotonic_ns(), checksum(live)))


def _take_buckets(link: Connection, live: dict[str, torch.Tensor], imported: list[torch.Tensor]) -> None:
    for number, bucket in enumerate(buckets_of(live, BUCKET_BYTES)):
        assert link.recv() == number
        offset = 0
        for flat, start, count in bucket:
            flat[start : start + count].copy_(imported[number % 2][offset : offset + count])
            offset += count
        torch.accelerator.synchronize()
        link.send(number)


class Sender:
    """The process that has the weights."""

    def __init__(self, links: list[Connection], place: str, gib: float, bucket_bytes: int) -> None:
        self._kind = accelerator()
        self._device = self._kind.device_of_slot(0)
        self._links = links
        self.tensors = make(gib, random=True)
        self._publisher = relight.Publisher(place, bucket_bytes=bucket_bytes)
        if not self._publisher.wait_for_engines(len(links), DEADLINE_S):
            raise RuntimeError("not every engine has come")
        self._buffers = DeviceBuffers(self._device, bucket_bytes)
        self._pair = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self.version = 0
        self.told: dict[str, str] = {}

    def handles(self, way: str) -> list[bytes]:
        if way == "ipc-buckets":
            return [handle for tensor in self._pair if (handle := self._kind.export(tensor))]
        if way == "ipc-tensors":
            return [handle for tensor in self.tensors.values() if (handle := self._kind.export(tensor))]
        return []

    def send(self, way: str) -> None:
        """Take part in one way."""
        if way == "ipc-buckets":
            self._send_buckets()
        elif way.startswith("relight"):
            on_device = way == "relight"
            source = SourceOnDevice(self.tensors, self._buffers) if on_device else relight.TensorSource(self.tensors)
            result = self._publisher.publish(source, version=self.version)
            if len(result.engines) != len(self._links) or (result.way.value == "on-device") != on_device:
                raise RuntimeError(f"{way}: {result.way}, {result.why}, {result.dropped}, {result.error}")
            self.told[way] = f"{result.way.value}, {result.buckets} buckets"

    def _send_buckets(self) -> None:
        for number, bucket in enumerate(buckets_of(self.tensors, BUCKET_BYTES)):
            if number > 1:
                self._answers(number - 2)
            offset = 0
            for flat, start, count in bucket:
                self._pair[number % 2][offset : offset + count].copy_(flat[start : start + count])
                offset += count
            self._kind.synchronize(self._device)
            for link in self._links:
                link.send(number)
        for last in range(max(0, number - 1), number + 1):
            self._answers(last)

    def _answers(self, number: int) -> None:
        for link in self._links:
            assert expect(link) == number


def expect(link: Connection) -> Any:
    """Return the next message of an engine. Raises RuntimeError if it has failed."""
    if not link.poll(DEADLINE_S):
        raise RuntimeError(f"no answer within {DEADLINE_S:g} s")
    found = link.recv()
    if isinstance(found, str) and "Traceback" in found:
        raise RuntimeError(found)
    return found


def measure(
    gib: float, engines: int, ways: list[str], rounds: int = 3, bucket_bytes: int = BUCKET_BYTES
) -> dict[str, Any]:
    """Return the median seconds of each way, after a round that does not count."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as place:
        pipes = [context.Pipe() for _ in range(engines)]
        processes = [context.Process(target=serve, args=(far, place, gib), daemon=True) for _, far in pipes]
        for process in processes:
            process.start()
        links = [near for near, _ in pipes]
        try:
            for link in links:
                link.send("limit" in ways and gib * (1 + 3 * engines) < 0.8 * _free_gib())
            return _measure(Sender(links, place, gib, bucket_bytes), links, ways, rounds) | {
                "gib": gib,
                "engines": engines,
                "bucket_mib": bucket_bytes // MIB,
            }
        finally:
            for process in processes:
                process.kill()
                process.join()


def _free_gib() -> float:
    free = accelerator().free_bytes(accelerator().device_of_slot(0))
    return (free or 0) / GIB


def _measure(sender: Sender, links: list[Connection], ways: list[str], rounds: int) -> dict[str, Any]:
    for link in links:
        assert expect(link) == "ready"
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way in ways:
            for tensor in sender.tensors.values():  # other weights each time: old ones must not pass for new
                tensor.view(torch.int16).view(-1)[::997] += 1
            sender.version += 1
            expected = checksum(sender.tensors)
            for link in links:
                link.send(Update(way, sender.version, sender.handles(way)))
            for link in links:
                assert expect(link) == "go"
            started = time.monotonic_ns()
            sender.send(way)
            ends = [expect(link) for link in links]
            if way != "limit" and any(found != expected for _, found in ends):
                raise RuntimeError(f"{way}: the weights did not arrive")
            seconds[way].append((max(ended for ended, _ in ends) - started) / 1e9)
    for link in links:
        link.send(None)
    nbytes = sum(tensor.nbytes for tensor in sender.tensors.values())
    medians = {way: statistics.median(values[1:]) for way, values in seconds.items()}
    return {
        "nbytes": nbytes,
        "first_s": {way: round(values[0], 4) for way, values in seconds.items()},
        "median_s": {way: round(value, 4) for way, value in medians.items()},
        "gib_per_s_each_engine": {way: round(nbytes / GIB / value, 1) for way, value in medians.items()},
        "told": sender.told,
    }
