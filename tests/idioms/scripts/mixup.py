"""Mixup and CutMix drawn from numpy's and Python's global streams, label smoothing, warm restarts."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def mixup_data(x, y, alpha=0.4):
    lam = np.random.beta(alpha, alpha)
    index = torch.from_numpy(np.random.permutation(len(x)))
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def cutmix_data(x, y):
    lam = random.random()
    size = x.shape[-1]
    cut = int(size * (1 - lam) ** 0.5)
    cx, cy = random.randint(0, size - cut), random.randint(0, size - cut)
    index = torch.randperm(len(x))
    x = x.clone()
    x[:, :, cx : cx + cut, cy : cy + cut] = x[index, :, cx : cx + cut, cy : cy + cut]
    return x, y, y[index], 1 - cut * cut / size**2


def main():
    job = relight.init()
    torch.manual_seed(37)
    ds = TensorDataset(torch.randn(96, 2, 6, 6), torch.randint(0, 4, (96,)))
    loader = DataLoader(ds, batch_size=8, sampler=DistributedSampler(ds, job.world_size, job.rank), drop_last=True)
    model = DDP(nn.Sequential(nn.Conv2d(2, 6, 3), nn.GELU(), nn.Flatten(), nn.Linear(96, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step in training.steps(until=16):
        with step as (x, y):
            x, a, b, lam = mixup_data(x, y) if random.random() < 0.5 else cutmix_data(x, y)
            out = model(x)
            loss = lam * criterion(out, a) + (1 - lam) * criterion(out, b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(step.epoch + step.number % len(loader) / len(loader))
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
