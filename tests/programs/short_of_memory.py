"""Trains while rank 0 has no memory for a copy of its state: an address space of little more than it has already."""

import argparse
import resource
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight

WIDTH = 4000  # 61 MiB of parameters, as many of gradients, twice as many of state
ROOM_BYTES = 92 * 2**20  # for the gradients of a backward pass, and not for the state
FULL_FROM = 4  # steps in which relight has copied what it compares come before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = relight.init()
    model = DDP(nn.Linear(WIDTH, WIDTH, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda number: torch.ones(1, WIDTH))
    training.checkpoint(options.checkpoint, every=FULL_FROM + 1)
    for step in training.steps(until=options.steps):
        with step as x:
            optimizer.zero_grad(set_to_none=False)  # its memory is not given back
            model(x).pow(2).mean().backward()
            optimizer.step()
            if job.rank == 0 and step.number == FULL_FROM:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + ROOM_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
