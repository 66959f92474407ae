"""Blocks that `fully_shard` made into its own classes count their calls, and keep a scale and a history."""

# ranks: 4
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import relight
from tests.idioms.digest import finish


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls, self.scale, self.scales = 0, 1.0, []

    def forward(self, x):
        self.calls += 1
        self.scale = 0.9 * self.scale + 0.05
        self.scales.append(round(self.scale, 4))
        return torch.relu(self.linear(x)) * self.scale


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.out = nn.Linear(width, 1)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        for block in self.blocks:
            x = x + block(x)
        return self.out(x) * (1 + 0.01 * self.passes)


def main():
    job = relight.init()
    torch.manual_seed(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net.best = float("inf")
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    training = relight.Training(model=net, optimizer=optimizer)
    for step in training.steps(10):
        with step:
            loss = net(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            net.best = min(net.best, loss.item())
    kept = [(block.calls, block.scale, block.scales) for block in net.blocks]
    finish(job, model=net, passes=net.passes, best=net.best, kept=kept)


main()
