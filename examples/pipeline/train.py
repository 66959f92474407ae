"""Trains a small network in a pipeline of two stages, with replicas: PP x DP.

    relight run --nproc-per-node 4 --standby 1 examples/pipeline/train.py

Half of the ranks run the first half of the network, the other half the second; each stage is on two ranks, which hold
the same bits. So any one rank may be lost, and any two that do not run the same stage. Beside the lines of every script
there is one argument: `relight.Training(pipeline=schedule)`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import relight

NUMBERS = 113  # the network learns to add two numbers modulo this one
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


def main() -> None:
    options = parse_arguments()
    job = relight.init()
    mesh = init_device_mesh(job.device.type, (2, job.world_size // 2), mesh_dim_names=("pp", "dp"))
    index = mesh.get_local_rank("pp")

    torch.manual_seed(options.seed + index)  # the ranks of one stage build the same module
    model = build_stage(index, options.width, options.layers).to(job.device)
    replicate(model, mesh=mesh["dp"])
    stage = PipelineStage(model, index, 2, job.device, group=mesh.get_group("pp"))
    schedule = SCHEDULES[options.schedule](stage, options.microbatches, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.1)

    def draw(number: int) -> tuple[Tensor, Tensor]:
        """The batch of this rank's pipeline: the first stage uses the pairs, the last one the sums."""
        place = number * mesh.size(1) + mesh.get_local_rank("dp")
        pairs = torch.randint(NUMBERS, (options.batch_size, 2), generator=torch.Generator().manual_seed(place))
        return pairs, pairs.sum(1) % NUMBERS

    training = relight.Training(model=model, optimizer=optimizer, data=draw, pipeline=schedule)
    for step in training.steps(until=options.steps):
        losses: list[Tensor] = []
        with step as (pairs, sums):
            if stage.is_first:
                schedule.step(pairs.to(job.device))
            else:
                schedule.step(target=sums.to(job.device), losses=losses)
                step.report(torch.stack(losses).mean())
            optimizer.step()
            optimizer.zero_grad()
        if job.rank == job.world_size - 1 and step.committed and (step.number + 1) % options.tell_every == 0:
            print(f"step {step.number + 1}: loss {torch.stack(losses).mean():.4f} on the last rank's batch", flush=True)


def build_stage(index: int, width: int, layers: int) -> nn.Sequential:
    """Half of the network."""
    blocks = [Block(2 * width) for _ in range(layers)]
    if index == 0:
        return nn.Sequential(nn.Embedding(NUMBERS, width), nn.Flatten(), *blocks)
    return nn.Sequential(*blocks, nn.Linear(2 * width, NUMBERS))


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
        description="Trains a small network in a pipeline of two stages, each on half of the processes. "
        "Start it with: relight run --nproc-per-node 4 [--standby M] examples/pipeline/train.py [arguments]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="optimizer steps in all")
    add("--schedule", choices=sorted(SCHEDULES), default="1F1B", help="of torch.distributed.pipelining")
    add("--microbatches", type=int, default=4, help="pieces of a batch, of which each stage works on one at a time")
    add("--batch-size", type=int, default=64, help="pairs of numbers in each pipeline's batch")
    add("--layers", type=int, default=1, help="blocks in each stage")
    add("--width", type=int, default=64, help="size of the vector for each number")
    add("--learning-rate", type=float, default=1e-3, help="of AdamW")
    add("--tell-every", type=int, default=50, help="steps between two lines about the loss")
    add("--seed", type=int, default=0, help="of the initial parameters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
