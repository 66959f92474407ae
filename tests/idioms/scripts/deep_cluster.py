"""Deep clustering: pseudo-labels by k-means over all features, made anew every few steps between steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def features_of(model, x):
    model.eval()
    with torch.no_grad():
        found = model.module[:-1](x)
    model.train()
    return found


def cluster(points, k, rounds=4):
    centers = points[:k].clone()
    for _ in range(rounds):
        nearest = torch.cdist(points, centers).argmin(1)
        for i in range(k):
            if (nearest == i).any():
                centers[i] = points[nearest == i].mean(0)
    return nearest


def main():
    job = relight.init()
    torch.manual_seed(108)
    x = torch.randn(48, 6)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer)
    assigned = None
    for step in training.steps(until=15):
        if step.number % 4 == 0:
            assigned = cluster(features_of(model, x), 3)
        with step:
            pick = torch.randperm(48, generator=torch.Generator().manual_seed(step.number))[job.rank :: job.world_size][
                :8
            ]
            optimizer.zero_grad()
            F.cross_entropy(model(x[pick]), assigned[pick]).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, assigned=assigned)


if __name__ == "__main__":
    main()
