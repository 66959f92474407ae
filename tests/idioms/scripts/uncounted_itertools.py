"""Counters of itertools and a map that go on from step to step."""

# ranks: 2
import itertools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(137)
    model = DDP(nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counter = itertools.count(1)
    lrs = itertools.cycle([0.1, 0.05, 0.2])
    scales = map(lambda k: 1 + 0.1 * k, itertools.chain(range(5), itertools.repeat(2)))
    training = relight.Training(model=model, optimizer=optimizer)
    total = 0
    for step in training.steps(until=14):
        with step:
            k, x = step.number, torch.randn(3, 5)
            for g in optimizer.param_groups:
                g["lr"] = next(lrs) * next(scales)
            optimizer.zero_grad()
            (model(x) - x.sin()).square().mean().backward()
            optimizer.step()
            total += next(counter) * k
    finish(job, model=model, optimizer=optimizer, total=total)


if __name__ == "__main__":
    main()
