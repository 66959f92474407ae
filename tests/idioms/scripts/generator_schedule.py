"""The learning rate comes from a generator function, the order of tasks from an iterator of the standard library."""

# ranks: 2
import itertools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def triangular(low, high, period):
    while True:
        for k in range(period):
            yield low + (high - low) * k / period
        for k in range(period, 0, -1):
            yield low + (high - low) * k / period


def main():
    job = relight.init()
    torch.manual_seed(79)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    rates = triangular(0.01, 0.2, 3)
    tasks = itertools.cycle([torch.sin, torch.cos, torch.tanh])
    for step in training.steps(until=12):
        with step as x:
            for group in optimizer.param_groups:
                group["lr"] = next(rates)
            task = next(tasks)
            optimizer.zero_grad()
            (model(x) - task(x[:, :2])).square().mean().backward()
            optimizer.step()
    finish(job, model=model, lr=optimizer.param_groups[0]["lr"])


if __name__ == "__main__":
    main()
