"""The time to form one gloo group of N idle processes, without relight: no recovery can do without it.

Every process connects to every other one. Processes are forked after torch was imported; a group is formed several
times, each time under a new store.

Run by ``python -m benchmarks.form_speed --workers 2 4 8 16``; prints one JSON object, in seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = 7
TIMEOUT = datetime.timedelta(seconds=60)
fork = multiprocessing.get_context("fork")


def form_s(workers: int, rounds: int) -> float:
    """Median over the rounds of the time until the slowest process has its group."""
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as directory:
        pipes = [fork.Pipe() for _ in range(workers)]
        ranks = [
            fork.Process(target=_rank, args=(rank, workers, theirs, directory), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        links = [ours for ours, _ in pipes]
        try:
            times = [_round(links, number) for number in range(rounds + 1)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return statistics.median(times[1:])  # the first one warms up


def _round(links: list[Connection], number: int) -> float:
    started_ns = time.monotonic_ns()
    for link in links:
        link.send(number)
    return (max(_formed_ns(link) for link in links) - started_ns) / 1e9


def _formed_ns(link: Connection) -> int:
    if not link.poll(TIMEOUT.total_seconds()):
        raise TimeoutError("a process did not form its group")
    return int(link.recv())


def _rank(rank: int, workers: int, link: Connection, directory: str) -> None:
    torch.set_num_threads(1)
    group = None
    try:
        while True:
            number = link.recv()
            del group  # only now: a peer that is still connecting to it would fail
            store = dist.FileStore(str(Path(directory) / f"store-{number}"), workers)  # type: ignore[attr-defined]
            group = dist.ProcessGroupGloo(store, rank, workers, TIMEOUT)
            link.send(time.monotonic_ns())
    except EOFError:
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to form a gloo group")
    parser.add_argument("--workers", type=int, nargs="+", default=(2, 4, 8, 16))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({str(workers): round(form_s(workers, options.rounds), 6) for workers in options.workers}))


if __name__ == "__main__":
    main()
