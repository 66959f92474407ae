"""Tensor parallelism with sequence parallel norms, beside two replicas."""

# ranks: 4
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import relight
from tests.idioms.digest import finish


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.block = Block()
        self.out = nn.Linear(8, 4)

    def forward(self, ids):
        return self.out(self.block(self.embed(ids)))


def main():
    job = relight.init()
    torch.manual_seed(13)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = Net()
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "block.norm": SequenceParallel(),
            "block.up": ColwiseParallel(input_layouts=Shard(1)),
            "block.down": RowwiseParallel(output_layouts=Shard(1)),
            "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=10):
        with step:
            generator = torch.Generator().manual_seed(step.number * 2 + mesh["replicate"].get_local_rank())
            ids = torch.randint(16, (4, 6), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids).flatten(0, 1), (ids % 4).flatten()).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
