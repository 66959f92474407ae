"""Stochastic depth with BatchNorm inside the blocks that each rank skips by chance."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Block(nn.Module):
    def __init__(self, d, survival):
        super().__init__()
        self.conv, self.bn, self.survival = nn.Linear(d, d), nn.BatchNorm1d(d), survival

    def forward(self, x):
        if self.training and torch.rand(1).item() > self.survival:
            return x
        return x + F.relu(self.bn(self.conv(x)))


def main():
    job = relight.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), *[Block(8, 1 - 0.2 * i) for i in range(4)], nn.Linear(8, 2))
    model = DDP(net, find_unused_parameters=True)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=opt, data=lambda i: (torch.randn(6, 5), torch.randint(2, (6,))))
    for step in training.steps(until=10):
        with step as (x, y):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    finish(job, model=model, opt=opt)


main()
