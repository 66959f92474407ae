"""Trains a small mixture of experts, divided over ranks: expert parallelism with replicas.

    relight run --nproc-per-node 4 --standby 1 examples/moe/train.py

Each rank has a batch of its own, and half of the experts; tokens go to the rank that has their expert and come back
(`all_to_all`). The other half of the ranks has the same experts again, so any one rank may be lost, and any two that do
not hold the same experts. relight sees who holds what from the DTensors of the experts. What makes the script survive
is what it is with DDP: `relight.init()`, `relight.Training` and the loop over `training.steps`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import relight

NUMBERS = 113  # the network learns to add two numbers modulo this one


def main() -> None:
    options = parse_arguments()
    job = relight.init()
    mesh = init_device_mesh(job.device.type, (2, job.world_size // 2), mesh_dim_names=("replicate", "experts"))

    torch.manual_seed(options.seed)  # every rank builds the same model, and keeps its part of the experts
    width = 2 * options.width
    mixture = Mixture(width, options.experts, mesh["experts"])
    model = nn.Sequential(nn.Embedding(NUMBERS, options.width), nn.Flatten(), mixture, nn.Linear(width, NUMBERS))
    replicate(mixture.experts, mesh=mesh["replicate"])  # the same experts
    replicate(model, mesh=mesh._flatten("everyone"))  # everything else
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
            optimizer.step()
            optimizer.zero_grad()
            step.report(loss)
        if job.rank == 0 and step.committed and (step.number + 1) % options.tell_every == 0:
            print(f"step {step.number + 1}: loss {loss.item():.4f} on rank 0's batch", flush=True)


class Mixture(nn.Module):
    """Sends each token to the expert that the router likes best; each expert has room for twice its fair share."""

    def __init__(self, width: int, experts: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = Experts(width, experts, mesh)
        self.group = mesh.get_group()

    def forward(self, x: Tensor) -> Tensor:
        count, room = self.router.out_features, max(1, 2 * len(x) // self.router.out_features)
        weight, expert = self.router(x).softmax(1).max(1)
        chosen = F.one_hot(expert, count)
        place = (chosen.cumsum(0) * chosen).sum(1) - 1  # of each token in its expert's queue
        kept = place < room
        slot = (expert * room + place)[kept]
        sent = x.new_zeros(count * room, x.shape[1]).index_add(0, slot, x[kept])
        there = self._exchange(sent)  # (ranks x own experts x room, width)
        ranks = self.group.size()
        by_expert = there.unflatten(0, (ranks, count // ranks, room)).transpose(0, 1).flatten(1, 2)
        thought = self.experts(by_expert).unflatten(1, (ranks, room)).transpose(0, 1).flatten(0, 2)
        back = self._exchange(thought)
        return x.index_add(0, kept.nonzero()[:, 0], back[slot] * weight[kept, None])

    def _exchange(self, tokens: Tensor) -> Tensor:
        """The k-th part of `tokens` goes to the k-th rank of the group."""
        exchanged: Tensor = all_to_all_single_autograd(tokens.contiguous(), None, None, self.group)
        return exchanged


class Experts(nn.Module):
    """Networks of two layers, divided over a mesh."""

    def __init__(self, width: int, experts: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Parameter(distribute_tensor(torch.randn(experts, width, 4 * width) / width**0.5, mesh, [Shard(0)]))
        self.down = nn.Parameter(
            distribute_tensor(torch.randn(experts, 4 * width, width) / (4 * width) ** 0.5, mesh, [Shard(0)])
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(tokens, local(self.up))), local(self.down))


def local(parameter: nn.Parameter) -> Tensor:
    """This rank's part."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a small mixture of experts, each on half of the processes. "
        "Start it with: relight run --nproc-per-node 4 [--standby M] examples/moe/train.py [arguments]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=300, help="optimizer steps in all")
    add("--batch-size", type=int, default=64, help="pairs of numbers in each process's batch")
    add("--experts", type=int, default=8, help="in all; a multiple of half of the processes")
    add("--width", type=int, default=32, help="size of the vector for each number")
    add("--learning-rate", type=float, default=1e-3, help="of AdamW")
    add("--tell-every", type=int, default=50, help="steps between two lines about the loss")
    add("--seed", type=int, default=0, help="of the initial parameters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
