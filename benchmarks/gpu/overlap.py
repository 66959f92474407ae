"""Copies of an update beside the kernels of a training step, by torch's profiler."""

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import relight
from benchmarks.gpu.publishing import DEADLINE_S, Sender, Update, expect, serve
from relight.transfer.tensors.device_buffers import SourceOnDevice

Span = tuple[float, float]


def measure(trace: Path, gib: float = 2.0) -> dict[str, Any]:
    """Publish while matrices are multiplied; return the share of the copies' time beside kernels. Writes the trace."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as place:
        near, far = context.Pipe()
        engine = context.Process(target=serve, args=(far, place, gib), daemon=True)
        engine.start()
        try:
            near.send(False)
            sender = Sender([near], place, gib, 256 * 2**20)
            assert expect(near) == "ready"
            for way in ("relight-host", "relight"):
                found[way] = _update(sender, near, way, trace)
            near.send(None)
        finally:
            engine.kill()
            engine.join()
    return found


def _update(sender: Sender, link: Any, way: str, trace: Path) -> dict[str, Any]:
    _publish_beside_kernels(sender, link, way)  # memory, buffers and the profiler's own start do not count
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        seconds = _publish_beside_kernels(sender, link, way)
    profile.export_chrome_trace(str(trace.with_name(f"{trace.stem}-{way}.json.gz")))
    kernels: list[Span] = []
    copies: list[Span] = []
    for event in profile.events() or ():
        if "cuda" in str(event.device_type).lower():
            span = (float(event.time_range.start), float(event.time_range.end))
            is_training = any(word in event.name for word in ("gemm", "nvjet", "clamp"))
            (kernels if is_training else copies).append(span)
    beside = sum(_beside(span, _joined(kernels)) for span in _joined(copies))
    whole = sum(end - start for start, end in _joined(copies))
    share = round(beside / whole, 3) if whole else None
    return {"seconds": round(seconds, 4), "copies_us": round(whole), "beside_kernels_share": share}


def _publish_beside_kernels(sender: Sender, link: Any, way: str) -> float:
    """Return the seconds from the update's start until every engine has it."""
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    sender.version += 1
    link.send(Update(way, sender.version, []))
    assert expect(link) == "go"
    on_device = way == "relight"
    source = SourceOnDevice(sender.tensors, sender._buffers) if on_device else relight.TensorSource(sender.tensors)
    started = time.monotonic()
    handle = sender._publisher.begin(source, version=sender.version)
    while handle.wait(0.0) is None and time.monotonic() < started + DEADLINE_S:
        for _ in range(8):
            matrix = (matrix @ matrix).clamp(-1, 1)
        torch.cuda.current_stream().synchronize()
    seconds = time.monotonic() - started
    expect(link)
    return seconds


def _joined(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _beside(span: Span, others: list[Span]) -> float:
    return sum((max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others), start=0.0)
