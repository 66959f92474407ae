"""Warm restarts make a new optimizer object every few steps."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(21)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=15):
        with step as x:
            if step.number and step.number % 5 == 0:
                optimizer = torch.optim.Adam(model.parameters(), 0.1 / (1 + step.number // 5))
            optimizer.zero_grad()
            (model(x) - x[:, :4].sin()).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
