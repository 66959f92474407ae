"""Encoder and decoder in a list, their optimizers in another, and schedules under a plural of its own."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(5)
    models = [DDP(nn.Linear(6, 4)), DDP(nn.Sequential(nn.ReLU(), nn.Linear(4, 6)))]
    optimizers = [torch.optim.SGD(models[0].parameters(), 0.1, momentum=0.9), torch.optim.Adam(models[1].parameters())]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in optimizers]
    training = relight.Training(
        model=models, optimizer=optimizers, schedules=schedules, data=lambda n: torch.randn(6, 6)
    )
    for step in training.steps(until=13):
        with step as x:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            h = x
            for model in models:
                h = model(h)
            (h - x).square().mean().backward()
            for optimizer, schedule in zip(optimizers, schedules):
                optimizer.step()
                schedule.step()
    finish(job, models=models, optimizers=optimizers, schedules=schedules)


if __name__ == "__main__":
    main()
