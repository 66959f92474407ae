"""Evaluation inside the block every few steps: model.eval(), a pass, metrics all-reduced, model.train(), then the update.

A failure in there must not leave the survivors in eval mode.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    logits = model.module(x)
    correct = (logits.argmax(1) == y).sum().float()
    metrics = torch.stack([correct, torch.tensor(float(len(y))), nn.functional.cross_entropy(logits, y)])
    dist.all_reduce(metrics)
    model.train()
    return (metrics[0] / metrics[1]).item()


def main():
    job = relight.init()
    torch.manual_seed(40)
    x, w = torch.randn(150, 6), torch.randn(6, 3)
    y = (x @ w).argmax(1)
    train = TensorDataset(x[:120], y[:120])
    loader = DataLoader(train, batch_size=8, sampler=DistributedSampler(train, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=18):
        with step as (inputs, labels):
            if step.number % 3 == 2:
                accuracy = validate(model, x[120:], y[120:])
                step.report(accuracy=accuracy)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
