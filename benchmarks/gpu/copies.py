"""Bandwidth of plain copies, which every figure of a transfer is held against."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from relight.device.choose import accelerator
from relight.transfer.io.buffers import Buffer
from relight.transfer.tensors.device_buffers import _sums

MIB = 2**20
GIB = 2**30


def measure(nbytes: int = 1024 * MIB) -> dict[str, Any]:
    """Return GiB/s: between host memory of several kinds and the device, on the device, and of a digest there."""
    kind = accelerator()
    device = kind.device_of_slot(0)
    own, other = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    pinned, plain = torch.zeros(nbytes, dtype=torch.uint8).pin_memory(), torch.zeros(nbytes, dtype=torch.uint8)
    shared = Buffer.create(nbytes)
    registered = torch.frombuffer(shared.view, dtype=torch.uint8)
    copies = {
        "pinned_to_device": (own, pinned),
        "device_to_pinned": (pinned, own),
        "shared_and_registered_to_device": (own, registered),
        "plain_to_device": (own, plain),
        "device_to_device": (other, own),
    }
    found = {
        name: rate(nbytes, functools.partial(target.copy_, source, non_blocking=True))
        for name, (target, source) in copies.items()
    }
    found["digest"] = rate(nbytes, lambda: _sums(own))
    found["digest_of_32_mib"] = rate(32 * MIB, lambda: _sums(own[: 32 * MIB]))
    del registered
    shared.close()
    return {f"{name}_gib_per_s": value for name, value in found.items()}


def rate(nbytes: int, run: Callable[[], object], rounds: int = 5) -> float:
    """Return the GiB/s of the fastest of some runs, each waited for."""
    kind = accelerator()
    device = kind.device_of_slot(0)
    times = []
    for _ in range(rounds + 1):
        kind.synchronize(device)
        started = time.perf_counter()
        run()
        kind.synchronize(device)
        times.append(time.perf_counter() - started)
    return round(nbytes / min(times[1:]) / GIB, 2)
