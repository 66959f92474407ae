"""A small job for what does not depend on the model: noticing, stopping, forming groups, and memory over many steps.

Under relight, or with ``--plain`` under torchrun. ``--pause-ms`` puts a pause in front of each forward pass: while
a device computes, its host waits, and two cores that stand for the hosts of several devices are idle. Without it
the workers compete for the cores.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight

PROGRESS = struct.Struct("<q")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Small steps, for relight or (--plain) torchrun")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--progress", type=Path, help="file of 8 bytes in which rank 0 keeps its number of steps")
    return parser.parse_args()


class Progress:
    """A number in a shared file: reading it costs the job nothing, unlike a log."""

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = None
        if path is not None:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), PROGRESS.size)

    def put(self, steps: int) -> None:
        """This many steps are done."""
        if self._map is not None:
            PROGRESS.pack_into(self._map, 0, steps)


class Work:
    """Model, optimizer and one step of both."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width = options.width
        layers = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)]
        self.model = DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._shape = (options.batch, width)
        self._pause_s = options.pause_ms / 1e3

    def step(self, number: int, rank: int) -> None:
        """Give the same numbers for the same step and rank, in whichever process."""
        generator = torch.Generator().manual_seed(number * 1000 + rank)
        inputs = torch.randn(self._shape, generator=generator)
        if self._pause_s:
            time.sleep(self._pause_s)
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()


def plain_steps(options: argparse.Namespace) -> Iterator[int]:
    """The steps of an ordinary loop."""
    dist.init_process_group("gloo")
    work = Work(options)
    for number in range(options.steps):
        work.step(number, dist.get_rank())
        yield number + 1
    dist.destroy_process_group()


def relight_steps(options: argparse.Namespace) -> Iterator[int]:
    """Steps under relight; only what rank 0 commits is progress."""
    job = relight.init()
    work = Work(options)
    training = relight.Training(model=work.model, optimizer=work.optimizer)
    for step in training.steps(until=options.steps):
        with step:
            work.step(step.number, job.rank)
        if step.committed and job.rank == 0:
            yield step.number + 1


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    progress = Progress(options.progress)
    steps = plain_steps(options) if options.plain else relight_steps(options)
    for done in steps:
        progress.put(done)


if __name__ == "__main__":
    main()
