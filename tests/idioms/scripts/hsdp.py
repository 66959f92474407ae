"""Hybrid sharded FSDP2: two replicas, each divided over two ranks; clipping by a norm over all parts."""

# ranks: 4
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import relight
from tests.idioms.digest import finish


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln, self.fc1, self.fc2 = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.ln(x))))


def main():
    job = relight.init()
    mesh = init_device_mesh("cpu", (2, job.world_size // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(52)
    model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 3))
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6)).steps(until=14):
        with step as x:
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
