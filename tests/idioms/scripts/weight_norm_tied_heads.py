"""Orthogonal and spectral parametrizations, tied heads, and a lazily initialized layer that DDP wraps after a dry run."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.LazyLinear(8)
        self.rot = orthogonal(nn.Linear(8, 8, bias=False))
        self.spec = spectral_norm(nn.Linear(8, 8))
        self.head_a, self.head_b = nn.Linear(8, 2), nn.Linear(8, 2)
        self.head_b.weight = self.head_a.weight

    def forward(self, x, which):
        h = torch.relu(self.spec(self.rot(self.inp(x))))
        return self.head_a(h) + which * self.head_b(h)


def main():
    job = relight.init()
    torch.manual_seed(110)
    net = Net()
    net(torch.randn(2, 6), 0.5)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            (model(x, float(step.number % 3)) - x[:, :2]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
