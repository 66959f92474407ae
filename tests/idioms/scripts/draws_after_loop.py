"""Samples of a generator and a permutation drawn after the last step, from the global streams."""

# ranks: 2
import random

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(77)
    generator = nn.Sequential(nn.Linear(3, 12), nn.Dropout(0.2), nn.Linear(12, 5))
    model = DDP(generator)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=11):
        with step:
            real = torch.randn(8, 5) + random.random()
            optimizer.zero_grad()
            (model(torch.randn(8, 3)) - real).square().mean().backward()
            optimizer.step()
    with torch.no_grad():
        samples = generator(torch.randn(4, 3))
    order = np.random.permutation(10).tolist()
    finish(job, model=model, optimizer=optimizer, samples=samples, order=order, shown=random.sample(range(50), 3))


if __name__ == "__main__":
    main()
