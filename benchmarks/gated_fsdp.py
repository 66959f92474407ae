"""A job that takes steps only when told to (`gated_ddp`), with its state divided by FSDP2, with or without buddies."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import relight
from benchmarks.gated_ddp import ENDLESS, Gate

LAYERS = 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Steps on demand, FSDP2 under relight")
    parser.add_argument("--gate", type=Path, required=True, help="Unix socket of the measuring process")
    parser.add_argument("--name", required=True, help="of this job, for the measuring process")
    parser.add_argument("--width", type=int, required=True, help="of each layer: the state grows with its square")
    parser.add_argument("--batch", type=int, required=True, help="samples for each rank: so long does a step take")
    parser.add_argument("--buddy", type=int, default=0, help="steps from one snapshot to the next; 0: none")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    job = relight.init()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (job.world_size,))
    model = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    training = relight.Training(model=model, optimizer=optimizer)
    if options.buddy:
        training.buddy(every=options.buddy)
    gate = Gate(options.gate, options.name, job.rank)
    x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(job.rank))
    for step in training.steps(until=ENDLESS):
        if not gate.passes():
            break
        with step:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
