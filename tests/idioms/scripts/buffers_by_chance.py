"""Layers that change buffers by chance, from some step on: one rank has changed one before another knows of it."""

# ranks: 3
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("hits", torch.zeros(1))
        self.register_buffer("last", torch.zeros(width), persistent=False)
        self.calls = 0

    def forward(self, x):
        counts, keeps = (torch.rand(2) < 0.25).tolist()
        self.calls += 1
        if self.calls > 4 and counts:
            self.hits += 1
        if self.calls > 4 and keeps:
            self.last.copy_(x.detach().mean(0))
        return x + self.linear(x).tanh() * (1 + 0.01 * self.hits) + 0.01 * self.last


def main():
    job = relight.init()
    torch.manual_seed(0)
    layers = nn.Sequential(*[Layer(4) for _ in range(4)])
    model = DDP(layers, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda number: torch.randn(6, 4))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            F.mse_loss(model(x), -x).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, last=[layer.last for layer in layers])


main()
