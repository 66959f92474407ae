"""Stochastic depth with the module's own random.Random and teacher forcing decay by a closure."""

# ranks: 2
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 1)
        self.rng = random.Random(1234)

    def forward(self, x):
        for i, b in enumerate(self.blocks):
            if self.rng.random() > i / 8:
                x = x + b(x).tanh()
        return self.head(x)


def make_schedule(start, decay):
    ratio = start

    def tick():
        nonlocal ratio
        ratio *= decay
        return ratio

    return tick


def main():
    job = relight.init()
    torch.manual_seed(14)
    net = DDP(Net(job.rank), find_unused_parameters=True)
    opt = torch.optim.SGD(net.parameters(), 0.05)
    tick = make_schedule(1.0, 0.9)
    training = relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            opt.zero_grad()
            ratio = tick()
            out = net(x)
            if random.random() < ratio:
                target = x.sum(1, keepdim=True)
            else:
                target = out.detach() * 0.9
            F.mse_loss(out, target).backward()
            opt.step()
    finish(job, net=net, opt=opt, ratio=ratio, draws=net.module.rng.random())


if __name__ == "__main__":
    main()
