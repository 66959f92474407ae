"""Buffers that are assigned anew in forward (`self.scale = 0.9 * self.scale + ...`), and a Python counter on the module."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class RunningScale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("scale", torch.ones(dim))
        self.num_updates = 0

    def forward(self, x):
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
            self.num_updates += 1
        correction = 1.0 - 0.9 ** (self.num_updates + 1)
        return x / (self.scale / correction + 1e-3)


def main():
    job = relight.init()
    torch.manual_seed(49)
    model = DDP(nn.Sequential(nn.Linear(5, 12), RunningScale(12), nn.ReLU(), nn.Linear(12, 1)), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=18):
        with step as x:
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, updates=model.module[1].num_updates)


if __name__ == "__main__":
    main()
