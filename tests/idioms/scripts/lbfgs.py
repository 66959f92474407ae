"""LBFGS with a closure that is called many times in one optimizer.step(), under DDP: collectives inside the write."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(24)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(job.world_size, 20, 4, generator=generator)
    y = torch.sin(x.sum(-1, keepdim=True))
    model = DDP(nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: (x[job.rank], y[job.rank]))
    for step in training.steps(until=12):
        with step as (inputs, targets):

            def closure():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
