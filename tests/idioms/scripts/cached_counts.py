"""A cached function that depends on more than its argument: it numbers what it sees, in the order of the first calls."""

import functools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

calls = []


@functools.lru_cache
def number_of(kind):
    calls.append(kind)
    return len(calls)


def main():
    job = relight.init()
    torch.manual_seed(3)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 4)).steps(until=12):
        with step as x:
            optimizer.zero_grad()
            number = number_of(step.number // 2)
            (model(x) - 0.1 * number).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, calls=calls)


if __name__ == "__main__":
    main()
