"""A replacement's state, from the device memory of one process into that of another, as a recovery moves it."""

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.publishing import GIB, checksum, expect, make
from relight.device.choose import accelerator
from relight.transfer.io.codec import Flat
from relight.transfer.restore.client import RestoreClient
from relight.transfer.restore.fabric import Address
from relight.transfer.restore.offer import Offer
from relight.transfer.restore.server import RestoreServer

DEADLINE_S = 120.0


def offer(link: Connection, path: Path, gib: float) -> None:
    """Be the source."""
    state = make(gib, random=True)
    server = RestoreServer(path, lambda: None)
    link.send("ready")
    while (generation := link.recv()) is not None:
        for tensor in state.values():
            tensor.view(torch.int16).view(-1)[::997] += 1
        accelerator().synchronize(accelerator().device_of_slot(0))
        server.offer(Offer(generation, 1, {}, Flat(state)))
        link.send(checksum(state))


def measure(gib: float, rounds: int = 3, connections: int = 1) -> dict[str, Any]:
    """Return the seconds of a fetch, and of copies of as many bytes by way of pinned memory."""
    kind = accelerator()
    device = kind.device_of_slot(0)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as place:
        near, far = context.Pipe()
        path = Path(place, "source.sock")
        source = context.Process(target=offer, args=(far, path, gib), daemon=True)
        source.start()
        try:
            state = make(gib, random=False)
            assert expect(near) == "ready"
            client, seconds = RestoreClient(lambda: None, DEADLINE_S), []
            for generation in range(1, rounds + 2):
                near.send(generation)
                expected = expect(near)
                started = time.perf_counter()
                client.fetch(generation, 1, [Address(str(path))] * connections, state.get)
                kind.synchronize(device)
                seconds.append(time.perf_counter() - started)
                if checksum(state) != expected:
                    raise RuntimeError("the state did not arrive")
            near.send(None)
        finally:
            source.kill()
            source.join()
    nbytes = sum(tensor.nbytes for tensor in state.values())
    median = statistics.median(seconds[1:])
    return {
        "gib": gib,
        "connections": connections,
        "first_s": round(seconds[0], 4),
        "median_s": round(median, 4),
        "gib_per_s": round(nbytes / GIB / median, 1),
    }
