"""Losses and hits are added up after the block, in a function for each epoch: nothing sets them before its first step.

Each epoch's last batch is smaller than the others, so that what an earlier block computed does not fit to it.
"""

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def train(training, model, optimizer):
    model.train()
    total = hits = count = 0
    for step in training.steps():
        with step as (x, y):
            output = model(x)
            loss = nn.functional.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not math.isfinite(loss.item()):
            raise SystemExit(f"the loss is {loss}")
        total += loss.item() * x.size(0)
        hits += (output.argmax(1) == y).sum().item()
        count += len(output)
    return total / count, hits / count


def main(epochs=3):
    job = relight.init()
    torch.manual_seed(83)
    data = TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for _ in training.epochs(epochs):
        train(training, model, optimizer)
    finish(job, model=model.module, optimizer=optimizer)


main()
