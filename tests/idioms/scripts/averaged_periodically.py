"""PostLocalSGDOptimizer with torch's own periodic model averager, no DDP, warm steps first."""

import torch
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch import nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(90)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    local = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=4)
    optimizer = PostLocalSGDOptimizer(local, averager)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=local, step=averager.step)


if __name__ == "__main__":
    main()
