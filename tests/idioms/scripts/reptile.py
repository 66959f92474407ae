"""Reptile: weights are saved, an inner SGD trains on a task of this rank alone, then the outer step moves from the saved
weights towards the mean over ranks. Everything is written by hand; the inner optimizer is new in each step."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def inner_train(model, steps, lr=0.02):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scale = torch.rand(()) * 2
    for _ in range(steps):
        x = torch.randn(8, 2)
        loss = (model(x) - scale * x.prod(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    job = relight.init()
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    outer = torch.optim.SGD(model.parameters(), lr=0.5)
    training = relight.Training(model=model, optimizer=outer)
    for step in training.steps(until=14):
        with step:
            fast = deepcopy(model)
            inner_train(fast, steps=3)
            outer.zero_grad()
            for slow_p, fast_p in zip(model.parameters(), fast.parameters()):
                delta = slow_p.data - fast_p.data
                dist.all_reduce(delta)
                slow_p.grad = delta / job.world_size
            outer.step()
    finish(job, model=model, outer=outer)


if __name__ == "__main__":
    main()
