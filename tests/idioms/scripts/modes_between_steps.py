"""Dropout switched off, layers frozen in turn and a hook, by the number of the step that has just ended."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(29)
    net = nn.Sequential(nn.Linear(5, 12), nn.Dropout(0.3), nn.Tanh(), nn.Linear(12, 1))
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=18):
        with step as x:
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.number % 3 == 2:
            model.module[0].requires_grad_(not model.module[0].weight.requires_grad)
        if step.number == 7:
            model.module[1].eval()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
