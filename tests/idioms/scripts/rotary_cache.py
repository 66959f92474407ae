"""Attention caches tables in plain attributes, made when they are first needed or a sequence is longer."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.table = None

    def forward(self, x):
        if self.table is None or self.table.shape[0] < x.shape[0]:
            self.table = torch.outer(torch.arange(x.shape[0]), torch.ones(100_000)).sin()
        return x * self.scale * self.table[: x.shape[0], : x.shape[1]]


def main():
    job = relight.init()
    torch.manual_seed(30)
    model = DDP(Rotary())
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4 + n % 7, 3))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
