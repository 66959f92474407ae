"""Attributes of a module annealed after the block: a number, and a dictionary changed in place."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 12), nn.Linear(12, 1)
        self.temperature = 2.0
        self.schedule = {"noise": 0.3}

    def forward(self, x):
        x = x + self.schedule["noise"] * torch.sin(x)
        return self.second(torch.tanh(self.first(x) / self.temperature))


def main():
    job = relight.init()
    torch.manual_seed(31)
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=18):
        with step as x:
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.number >= 4:
            net.temperature = max(0.5, net.temperature * 0.95)
            net.schedule["noise"] *= 0.9
    finish(job, model=model, optimizer=optimizer, temperature=net.temperature, schedule=net.schedule)


if __name__ == "__main__":
    main()
