"""One sender, several receivers on one host, and every way of getting the same weights from the one to the others.

    python -m benchmarks.weights.publishing --model dense --mib 1024 --receivers 4 --rounds 3

prints one JSON object. All ways use the same processes and the same tensors, in turns. A way's time begins when the
sender begins and ends when the last receiver has the weights in its own parameters.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

import relight
from benchmarks.weights.packing import flat_for, packed, unpack
from benchmarks.weights.shapes import MIB, MODELS
from relight.transfer.plan.schedule import Form
from relight.transfer.plan.timings import overlap, stages_of
from relight.transfer.plan.update.result import Published
from relight.transfer.plan.update.way import Way
from relight.transfer.publish.source import Source
from relight.transfer.tensors import lent_weights, staging, weights
from relight.transfer.tensors.lent_weights import LentWeights

OURS = ("relight", "relight-serial", "relight-copied", "unverified")
COALESCED_BYTES = 256 * MIB
PIPELINE_BYTES = 64 * MIB  # of each of the two buffers of the double-buffered pipeline over gloo
WAYS = (*OURS[:3], "per-tensor", "coalesced", "pipeline", "limit", "limit-with-source", "unverified")
NOT_MOVED = ("limit", "limit-with-source")  # the weights, by these
DEADLINE_S = 300.0


class Weights(nn.Module):
    """Named parameters, and nothing else."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor, requires_grad=False))

    def named(self) -> dict[str, torch.Tensor]:
        return {name.replace("/", "."): parameter.data for name, parameter in self.named_parameters()}


class Peer:
    """The sender (rank 0) or a receiver: its side of every way."""

    def __init__(self, rank: int, world: int, store: str, model: Weights) -> None:
        self.rank, self.world, self.model = rank, world, model
        group_store = dist.FileStore(store, world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=world)

    def per_tensor(self) -> None:
        """The way that people write first: broadcast each tensor, then load_state_dict."""
        received = {}
        for name, tensor in self.model.state_dict().items():
            buffer = tensor if self.rank == 0 else torch.empty_like(tensor)
            dist.broadcast(buffer, 0)
            received[name] = buffer
        if self.rank:
            self.model.load_state_dict(received)

    def coalesced(self) -> None:
        """Tensors packed into buckets of 256 MiB, one broadcast each, then copied to their places."""
        for bucket in self._packed(COALESCED_BYTES):
            flat = flat_for(bucket, fill=self.rank == 0)
            dist.broadcast(flat, 0)
            if self.rank:
                unpack(flat, bucket)

    def pipeline(self) -> None:
        """The design of checkpoint-engine on CPU buffers: two buffers, the broadcast of the next bucket while the
        last one is copied to its place."""
        before: tuple[Any, torch.Tensor, list[torch.Tensor]] | None = None
        for bucket in self._packed(PIPELINE_BYTES):
            flat = flat_for(bucket, fill=self.rank == 0)
            work = dist.broadcast(flat, 0, async_op=True)
            if before is not None:
                self._arrive(*before)
            before = (work, flat, bucket)
        if before is not None:
            self._arrive(*before)

    def _arrive(self, work: Any, flat: torch.Tensor, bucket: list[torch.Tensor]) -> None:
        work.wait()
        if self.rank:
            unpack(flat, bucket)

    def _packed(self, limit_bytes: int) -> list[list[torch.Tensor]]:
        return packed((parameter.data for parameter in self.model.parameters()), limit_bytes)

    def limit(self, *, rank_0: bool = False) -> None:
        """The limit of memory: every receiver copies as many bytes as the weights have, in its own memory."""
        if self.rank == 0 and not rank_0:
            return
        for tensor in self.model.parameters():
            source = self._source()
            count = tensor.numel() * tensor.element_size()
            step = source.numel()
            for start in range(0, count, step):
                ctypes.memmove(tensor.data_ptr() + start, source.data_ptr(), min(step, count - start))

    def limit_with_source(self) -> None:
        """Copy in the sender too: where receivers copy out of a buffer, it was copied into before."""
        self.limit(rank_0=True)

    def _source(self) -> torch.Tensor:
        """Different bytes each time, in turns: what was read before is not in the core's own caches any more."""
        if not hasattr(self, "_sources"):
            self._sources = [torch.ones(8 * MIB, dtype=torch.uint8) for _ in range(32)]
            self._turn = 0
        self._turn = (self._turn + 1) % len(self._sources)
        return self._sources[self._turn]


def receive(rank: int, options: dict[str, Any], store: str, place: str, link: Connection) -> None:
    """A receiver's process."""
    torch.set_num_threads(1)
    model = Weights({name: torch.zeros_like(t) for name, t in MODELS[options["model"]](options["mib"]).items()})
    peer = Peer(rank, options["receivers"] + 1, store, model) if options["gloo"] else None
    receiver = relight.Receiver(place, model=_live(model), name=f"engine-{rank}")
    link.send("ready")
    while (order := link.recv()) is not None:
        way, version = order
        verify(way != "unverified")
        link.send("go")
        before = time.process_time()
        if way.startswith("relight") or way == "unverified":
            receiver.wait_for(version)
        else:
            assert peer is not None
            getattr(peer, way.replace("-", "_"))()
        link.send((time.monotonic_ns(), time.process_time() - before))
        if way not in NOT_MOVED:
            link.send(_checksum(model.named()))
    receiver.close()


def verify(on: bool) -> None:
    """In this process: whether sources and engines take digests of what they copy, as relight does."""
    for module in (weights, staging, lent_weights):
        setattr(module, "xxhash", xxhash if on else _NoDigest)  # noqa: B010


class _NoDigest:
    """In the place of the module xxhash: every digest is the same, and costs nothing."""

    @staticmethod
    def xxh3_64() -> _NoDigest:
        return _NoDigest()

    def update(self, _: memoryview) -> None:
        pass

    def intdigest(self) -> int:
        return 0

    @staticmethod
    def xxh3_64_intdigest(_: memoryview) -> int:
        return 0


def _live(model: Weights) -> dict[str, torch.Tensor]:
    return {name.replace("/", "."): parameter for name, parameter in model.named_parameters()}


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    """Cheap, and enough to notice weights that did not arrive."""
    return sum(int(tensor.view(torch.int16).flatten()[::997].to(torch.int64).sum()) for tensor in tensors.values())


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Every way, `rounds` times in turns after one that does not count."""
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as directory:
        store, place = str(Path(directory) / "store"), directory
        pipes = [spawn.Pipe() for _ in range(options["receivers"])]
        processes = [
            spawn.Process(target=receive, args=(rank + 1, options, store, place, far), daemon=True)
            for rank, (_, far) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        links = [near for near, _ in pipes]
        try:
            return _measure(options, store, place, links)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _measure(options: dict[str, Any], store: str, place: str, links: list[Connection]) -> dict[str, Any]:
    model = Weights(MODELS[options["model"]](options["mib"]))
    peer = Peer(0, options["receivers"] + 1, store, model) if options["gloo"] else None
    source = LentWeights(_live(model))
    copied = relight.TensorSource(model.named())
    version = 0
    with relight.Publisher(place, bucket_bytes=options["bucket_bytes"]) as publisher:
        for link in links:
            _expect(link)
        if not publisher.wait_for_engines(len(links), DEADLINE_S):
            raise RuntimeError("not every receiver has come")

        def publish(form: Form, source: Source) -> Callable[[], dict[str, Any]]:
            def run() -> dict[str, Any]:
                result = publisher.publish(source, version=version, form=form)
                if len(result.engines) != len(links):
                    raise RuntimeError(f"not every engine took it: {result.dropped}")
                if (result.way is Way.LENT) != (source is not copied):
                    raise RuntimeError(f"{result.way}: {result.why}")
                return _stage_seconds(result)

            return run

        sides: dict[str, Callable[[], Any]] = {
            "relight": publish(Form.TWO_STAGE, source),
            "relight-serial": publish(Form.SERIAL, source),
            "relight-copied": publish(Form.TWO_STAGE, copied),
            "unverified": publish(Form.TWO_STAGE, source),
        }
        if peer is not None:
            sides |= {way: getattr(peer, way.replace("-", "_")) for way in WAYS if way not in sides}
        seconds: dict[str, list[float]] = {way: [] for way in options["ways"]}
        cpu_seconds: dict[str, list[float]] = {way: [] for way in options["ways"]}
        stages: dict[str, list[dict[str, Any]]] = {way: [] for way in options["ways"]}
        for round_ in range(options["rounds"] + 1):
            for way in options["ways"]:
                gc.collect()
                for tensor in model.parameters():  # other weights each time: old ones must not pass for new
                    tensor.data.view(torch.int16).view(-1)[:8] += 1
                version += 1
                expected = _checksum(model.named())
                verify(way != "unverified")
                for link in links:
                    link.send((way, version))
                for link in links:
                    _expect(link)
                before, started_ns = time.process_time(), time.monotonic_ns()
                stage = sides[way]()
                ends = [_expect(link) for link in links]
                ended_ns = max(end_ns for end_ns, _ in ends)
                if way not in NOT_MOVED and any(_expect(link) != expected for link in links):
                    raise RuntimeError(f"{way}: the weights did not arrive")
                if round_:
                    seconds[way].append((ended_ns - started_ns) / 1e9)
                    cpu_seconds[way].append(time.process_time() - before + sum(cpu for _, cpu in ends))
                    stages[way].append(stage or {})
        for link in links:
            link.send(None)
    return {
        "options": options,
        "total_bytes": source.manifest.total_bytes,
        "tensors": len(source.manifest.entries),
        "seconds": seconds,
        "median_s": {way: statistics.median(values) for way, values in seconds.items()},
        "median_cpu_s": {way: statistics.median(values) for way, values in cpu_seconds.items()},  # all processes
        "stages": {
            way: {what: statistics.median(value[what] for value in values) for what in values[0]}
            for way, values in stages.items()
            if values and values[0]
        },
    }


def _stage_seconds(result: Published) -> dict[str, Any]:
    """Seconds of writing and of loading, per bucket, and how much of the writing ran beside loading."""
    writes, loads = stages_of(result, "broadcast"), stages_of(result, "reload")
    return {
        "write_s": statistics.median(stage.end_ns - stage.start_ns for stage in writes) / 1e9,
        "load_s": statistics.median(stage.end_ns - stage.start_ns for stage in loads) / 1e9,
        "written_beside_loads": overlap(writes, loads),
    }


def _expect(link: Connection) -> Any:
    if not link.poll(DEADLINE_S):
        raise RuntimeError(f"no answer within {DEADLINE_S:g} s")
    return link.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description="Every way of getting weights to several receivers")
    parser.add_argument("--model", choices=sorted(MODELS), default="dense")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--bucket-bytes", type=int, default=32 * MIB)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = vars(parser.parse_args())
    options["gloo"] = any(way not in OURS for way in options["ways"])
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
