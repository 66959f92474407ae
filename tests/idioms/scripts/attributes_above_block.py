"""Attributes of a module that code above the block counts: a number, a mean, a list, and one that the first step adds."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.turns, self.mean, self.seen = 0, 0.0, []

    def forward(self, x):
        return self.layer(x) * (1 + 0.01 * self.turns)


def main():
    job = relight.init()
    torch.manual_seed(0)
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda number: torch.randn(4, 4))
    for step in training.steps(until=12):
        net.turns += 1
        net.mean = 0.9 * net.mean + step.number
        net.seen.append(step.number)
        net.late = getattr(net, "late", 0) + 1
        with step as x:
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, turns=net.turns, mean=net.mean, seen=net.seen, late=net.late)


if __name__ == "__main__":
    main()
