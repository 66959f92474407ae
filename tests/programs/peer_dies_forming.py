"""Rank 1 ends once the first group is formed, before its peers have looked at what they formed."""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import relight
from relight.training.collectives import sockets

PATIENCE_SECONDS = 60.0


def look_late() -> None:
    """Have this process look for its group's sockets only once a peer's connection is gone."""
    formed = sockets.GroupSockets.formed

    def late(self: sockets.GroupSockets) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(self._fits(epoll) for epoll in sockets._epoll_descriptors()) and time.monotonic() < deadline:
            time.sleep(0.001)
        formed(self)

    sockets.GroupSockets.formed = late  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("killed", "raises"), required=True)
    parser.add_argument("--marker", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    first_start = not options.marker.exists()
    if first_start and os.environ["RANK"] != "1":
        look_late()
    job = relight.init()
    if first_start and job.rank == 1:
        options.marker.touch()
        if options.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("sample 17 is broken on rank 1")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=options.steps):
        with step:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
