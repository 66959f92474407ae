"""Weights clipped, an average moved, and a scheduler stepped by a late evaluation: all after the block."""

import copy

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(37)
    net = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1))
    average = copy.deepcopy(net)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    training = relight.Training(
        model={"model": model, "average": average},
        optimizer=optimizer,
        scheduler=scheduler,
        data=lambda n: torch.randn(8, 5),
    )
    for step in training.steps(until=18):
        with step as x:
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for weight in net.parameters():
                weight.data.clamp_(-0.4, 0.4)
            for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(weight, 0.2)
        if step.number >= 8 and step.number % 3 == 2:
            scheduler.step(average[3].weight.abs().sum().item())
        if step.number == 12:
            optimizer.param_groups[0]["weight_decay"] = 0.2
    finish(job, model=model, average=average, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
