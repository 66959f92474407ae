"""The speed at which this machine copies: no restore can beat it.

Two figures for the same number of bytes. A flat copy inside one process: the memory itself. A Unix socket from one
process's tensor into another's: what the kernel takes when nothing is shared, in pieces of the usual size. Both go
over memory that was touched before, many times over, and the median pass counts.

Run by ``python -m benchmarks.copy_speed --bytes N``; prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable

import torch

PASSES = 9
PIECE_BYTES = 4 * 2**20
BUFFER_BYTES = 2**20


def flat_copy_s(size: int, passes: int) -> float:
    """Median seconds of one pass from one tensor to another, by one thread."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    target.copy_(source)
    return statistics.median(_timed(lambda: target.copy_(source)) for _ in range(passes))


def socket_copy_s(size: int, passes: int) -> float:
    """Median seconds of one pass from memory of this process into memory of a child."""
    near, far = socket.socketpair()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    child = multiprocessing.get_context("fork").Process(target=_receive, args=(near, far, size), daemon=True)
    child.start()
    far.close()
    source = b"\1" * size

    def send() -> None:
        near.sendall(source)
        near.recv(1)  # everything has arrived

    try:
        send()
        return statistics.median(_timed(send) for _ in range(passes))
    finally:
        near.close()
        child.join()


def _receive(near: socket.socket, far: socket.socket, size: int) -> None:
    """In the child: read passes until the parent hangs up."""
    near.close()
    target = memoryview(bytearray(size))
    while True:
        start = 0
        while start < size:
            received = far.recv_into(target[start : start + PIECE_BYTES])
            if received == 0:
                return
            start += received
        far.send(b".")


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of a flat copy and of a Unix socket")
    parser.add_argument("--bytes", type=int, default=240 * 2**20)
    parser.add_argument("--passes", type=int, default=PASSES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {
        "bytes": options.bytes,
        "flat_copy_s": round(flat_copy_s(options.bytes, options.passes), 6),
        "unix_socket_s": round(socket_copy_s(options.bytes, options.passes), 6),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
