"""How fast this machine copies: what no restore can beat.

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

import torch

PASSES = 9
PIECE_BYTES = 4 * 2**20


def flat_copy_s(size: int, passes: int) -> float:
    """Median seconds of one pass from one tensor to another, by one thread."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    target.copy_(source)
    return statistics.median(_timed(lambda: target.copy_(source)) for _ in range(passes))


def socket_copy_s(size: int, passes: int) -> float:
    """Median seconds of one pass from a tensor of this process into one of a child."""
    near, far = socket.socketpair()
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=_receive, args=(far, size, passes + 1), daemon=True)
    child.start()
    far.close()
    source = _view(torch.ones(size, dtype=torch.uint8))
    try:
        _send(near, source)
        return statistics.median(_timed(lambda: _send(near, source)) for _ in range(passes))
    finally:
        near.close()
        child.join()


def _send(link: socket.socket, source: memoryview) -> None:
    link.sendall(source)
    link.recv(1)  # everything has arrived


def _receive(link: socket.socket, size: int, passes: int) -> None:
    target = _view(torch.zeros(size, dtype=torch.uint8))
    for _ in range(passes):
        start = 0
        while start < size:
            start += link.recv_into(target[start : start + PIECE_BYTES])
        link.send(b".")


def _view(tensor: torch.Tensor) -> memoryview:
    """Its bytes, without NumPy."""
    import ctypes

    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def _timed(work: object) -> float:
    assert callable(work)
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
