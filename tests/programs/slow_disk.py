"""Trains with a checkpoint of every step, and ranks whose disk is slow at different steps.

Rank 0 still writes the checkpoint of step 1 when that of step 2 is due, and rank 1 that of step 2 when that of step 3
is due: rank 1 has no part of the checkpoint of step 3, which rank 0 begins. `--stuck`: instead, the disk of rank 1 is
never done with anything, until the rank has a new process.
"""

import argparse
import os
import sys
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight

WRITER = "relight-checkpoint"


class SlowDisk:
    """A disk that is done with nothing until training has come to a step."""

    def __init__(self, rank: int, *, stuck: bool) -> None:
        self._rank = rank
        self._stuck = stuck
        self._arrived = threading.Condition()
        self._step = 0
        self._slow_until = 2 if rank == 0 and not stuck else 0
        self._sync = os.fsync

    def sync(self, descriptor: int) -> None:
        """Write a file out, once training has come far enough."""
        if threading.current_thread().name == WRITER:
            with self._arrived:
                self._arrived.wait_for(lambda: self._step >= self._slow_until)
        self._sync(descriptor)

    def arrive(self, step: int) -> None:
        """Tell the disk that training is in this step: the checkpoint before it was due when it began."""
        if self._stuck:
            if (self._rank, step) == (1, 0):
                self._slow_until = sys.maxsize
            return
        with self._arrived:
            self._step = step
            self._arrived.notify_all()
        if (self._rank, step) in ((1, 1), (0, 2), (1, 3)):
            for thread in threading.enumerate():
                if thread.name == WRITER:
                    thread.join()
            self._slow_until = step + 2 if step == 1 else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--stuck", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = relight.init()
    disk = SlowDisk(job.rank, stuck=options.stuck)
    setattr(os, "fsync", disk.sync)  # noqa: B010
    torch.manual_seed(1)
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number * 100 + job.rank)
        return torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)

    training = relight.Training(model=model, optimizer=optimizer, data=batch)
    training.carry(ignore=("disk",))  # a replacement has its own
    training.checkpoint(options.checkpoint, every=1)
    for step in training.steps(until=options.steps):
        with step as (x, y):
            if not step.warmup:
                disk.arrive(step.number)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
