"""Trains a small network with ZeRO-1: each rank keeps the optimizer's state of some parameters only, and updates these.

    relight run --nproc-per-node 4 --standby 1 examples/zero/train.py

Over all ranks at once every part would have one holder, and the first loss would end the job. So the state is divided
among half of the ranks (`process_group=`), and the other half divides it in the same way: two holders for each part,
for twice the memory. What makes the script survive is what it is with DDP: `relight.init()`, `relight.Training` and the
loop over `training.steps`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import relight

NUMBERS = 113  # the network learns to add two numbers modulo this one


def main() -> None:
    options = parse_arguments()
    job = relight.init()
    mesh = init_device_mesh(job.device.type, (2, job.world_size // 2), mesh_dim_names=("replicate", "zero"))

    torch.manual_seed(options.seed)
    hidden = [layer for _ in range(options.layers) for layer in (nn.Linear(options.width, options.width), nn.GELU())]
    network = nn.Sequential(
        nn.Embedding(NUMBERS, options.width // 2), nn.Flatten(), *hidden, nn.Linear(options.width, NUMBERS)
    )
    model = DistributedDataParallel(network.to(job.device))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=mesh.get_group("zero"), lr=options.learning_rate
    )

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
            optimizer.step()
            optimizer.zero_grad()
            step.report(loss)
        if job.rank == 0 and step.committed and (step.number + 1) % options.tell_every == 0:
            print(f"step {step.number + 1}: loss {loss.item():.4f} on rank 0's batch", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small network with an optimizer whose state is divided among half of the processes. "
        "Start it with: relight run --nproc-per-node 4 [--standby M] examples/zero/train.py [arguments]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="optimizer steps in all")
    add("--batch-size", type=int, default=64, help="pairs of numbers in each process's batch")
    add("--layers", type=int, default=2, help="hidden layers of the network")
    add("--width", type=int, default=128, help="of the hidden layers")
    add("--learning-rate", type=float, default=1e-3, help="of AdamW")
    add("--tell-every", type=int, default=50, help="steps between two lines about the loss")
    add("--seed", type=int, default=0, help="of the initial parameters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
