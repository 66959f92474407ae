"""A trainer keeps the loss of the last batch, gathers results of each rank between epochs, and keeps the best weights."""

import copy
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class Trainer:
    def __init__(self, job):
        torch.manual_seed(8)
        self.job = job
        x, y = torch.randn(54, 5), torch.randn(54, 1)
        data = TensorDataset(x[:36], y[:36])
        loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data, job.world_size, job.rank))
        self.held = x[36:], y[36:]
        self.net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))
        self.model = DDP(self.net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.8)
        self.training = relight.Training(model=self.model, optimizer=self.optimizer, data=loader)
        self.noise = torch.Generator().manual_seed(100 + job.rank)
        self.loss = self.best = None
        self.log = []

    def fit(self, epochs):
        for epoch in self.training.epochs(epochs):
            for step in self.training.steps():
                with step as (x, y):
                    self.loss = nn.functional.mse_loss(self.model(x), y)
                    self.optimizer.zero_grad()
                    self.loss.backward()
                    self.optimizer.step()
                    self.norm = float(sum(p.grad.norm() for p in self.net.parameters()))
            self.validate(epoch)

    def validate(self, epoch):
        chosen = torch.randperm(18, generator=self.noise)[:6]
        shift = random.random() + np.random.rand() + torch.rand(()).item()
        with torch.no_grad():
            error = nn.functional.mse_loss(self.net(self.held[0][chosen]), self.held[1][chosen]).item()
        errors = [None] * self.job.world_size
        dist.all_gather_object(errors, (error, self.loss.item(), self.norm, shift))
        self.log.append((epoch, errors))
        mean = sum(one[0] for one in errors) / len(errors)
        if self.best is None or mean < self.best[0]:
            self.best = mean, copy.deepcopy(self.net.state_dict())
        elif self.job.rank == 0:
            print(f"no progress: {mean}")
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 - 0.1 * min(1.0, shift_of(errors))


def shift_of(errors):
    return sum(one[3] for one in errors) / (3 * len(errors))


def main():
    job = relight.init()
    trainer = Trainer(job)
    trainer.fit(4)
    finish(job, model=trainer.model, optimizer=trainer.optimizer, log=trainer.log, best=trainer.best)


main()
