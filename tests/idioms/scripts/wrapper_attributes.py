"""Counters, histories and meters are attributes of the DDP wrapper, not of the module inside."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total += value
        self.count += 1


def main():
    job = relight.init()
    torch.manual_seed(9)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.global_step = 0
    model.smoothed = 0.0
    model.history = []
    model.meter = Meter()
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(12):
        with step:
            x = torch.randn(8, 6)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)) * (1 + 0.01 * model.global_step)
            optimizer.zero_grad()
            loss.backward()
            model.smoothed = 0.9 * model.smoothed + 0.1 * loss.item()
            model.meter.update(loss.item())
            model.history.append(model.smoothed)
            optimizer.step()
            model.global_step += 1
    meter = (model.meter.total, model.meter.count)
    finish(job, model=model.module, steps=model.global_step, history=model.history, meter=meter)


main()
