"""Trains a small network whose state is divided over ranks: HSDP, that is FSDP2 on a mesh with a replicate dimension.

    relight run --nproc-per-node 4 --standby 1 examples/hsdp/train.py

Half of the ranks hold one copy of the state, divided among them, the other half another copy. Every part has two
holders, so any one rank may be lost, and any two that do not hold the same part. relight sees the parts from the model
itself and says so before the first step. What makes the script survive is what it is with DDP: `relight.init()`,
`relight.Training` and the loop over `training.steps`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import relight

NUMBERS = 113  # the network learns to add two numbers modulo this one


def main() -> None:
    options = parse_arguments()
    job = relight.init()
    mesh = init_device_mesh(job.device.type, (2, job.world_size // 2), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(options.seed)  # every rank builds the same model, and keeps its part of it
    model = nn.Sequential(
        nn.Embedding(NUMBERS, options.width),
        nn.Flatten(),
        *[Block(2 * options.width) for _ in range(options.layers)],
        nn.Linear(2 * options.width, NUMBERS),
    ).to(job.device)
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)

    def draw(number: int) -> tuple[Tensor, Tensor]:
        """This rank's batch of that number: `job.rank` is read when it is needed."""
        generator = torch.Generator().manual_seed(number * job.world_size + job.rank)
        pairs = torch.randint(NUMBERS, (options.batch_size, 2), generator=generator)
        return pairs, pairs.sum(1) % NUMBERS

    training = relight.Training(model=model, optimizer=optimizer, data=draw)
    for step in training.steps(until=options.steps):
        with step as (pairs, sums):
            loss = F.cross_entropy(model(pairs.to(job.device)), sums.to(job.device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            optimizer.zero_grad()
            step.report(loss)
        if job.rank == 0 and step.committed and (step.number + 1) % options.tell_every == 0:
            print(f"step {step.number + 1}: loss {loss.item():.4f} on rank 0's batch", flush=True)


class Block(nn.Module):
    """A network of two layers, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        thought: Tensor = self.network(x)
        return x + thought


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small network with FSDP2 on a mesh of two replicas. "
        "Start it with: relight run --nproc-per-node 4 [--standby M] examples/hsdp/train.py [arguments]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="optimizer steps in all")
    add("--batch-size", type=int, default=64, help="pairs of numbers in each process's batch")
    add("--layers", type=int, default=2, help="blocks of the network")
    add("--width", type=int, default=64, help="size of the vector for each number")
    add("--learning-rate", type=float, default=1e-3, help="of AdamW")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient, over all parts")
    add("--tell-every", type=int, default=50, help="steps between two lines about the loss")
    add("--seed", type=int, default=0, help="of the initial parameters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
