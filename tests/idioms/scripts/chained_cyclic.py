"""ASGD under two chained schedulers, one of them cyclic in rate and momentum's place."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(2)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.1, t0=4, lambd=1e-3)
    scheduler = torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.CyclicLR(
                optimizer, 0.02, 0.2, step_size_up=3, mode="exp_range", gamma=0.97, cycle_momentum=False
            ),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
        ],
        optimizer=optimizer,
    )
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=16):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :4].sin()).square().mean().backward()
            optimizer.step()
            scheduler.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
