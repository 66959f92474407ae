"""Class weights from counts that grow with the data, kept in a Counter and a closure."""

import collections

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def make_weigher(classes):
    counts = collections.Counter()

    def weigh(labels):
        counts.update(labels.tolist())
        total = sum(counts.values())
        return torch.tensor([total / (classes * max(1, counts[c])) for c in range(classes)])

    weigh.counts = counts
    return weigh


def main():
    job = relight.init()
    torch.manual_seed(109)
    x = torch.randn(60, 6)
    data = TensorDataset(x, (x[:, 0] > 1).long() + (x[:, 1] > 1).long())
    loader = DataLoader(data, batch_size=4, shuffle=False, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    weigh = make_weigher(3)
    for step in training.steps(until=15):
        with step as (inputs, labels):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels, weight=weigh(labels)).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, counts=sorted(weigh.counts.items()))


if __name__ == "__main__":
    main()
