"""Layers keep tensors in plain attributes from step to step: with their graph, without one, or requiring gradients."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.hidden = None

    def forward(self, x):
        hidden = torch.zeros(4, 3) if self.hidden is None else self.hidden.detach()
        self.hidden = torch.tanh(self.linear(x) + 0.5 * hidden)
        return self.hidden


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.bank = torch.ones(400)

    def forward(self, x):
        out = x * self.scale * self.bank[:3]
        self.bank = self.bank * 0.9 + 0.1 * out.detach().mean()
        return out


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = torch.zeros(3, requires_grad=True)

    def forward(self, x):
        out = x * self.scale + self.shift
        self.shift = (self.shift.detach() * 0.9 + 0.1 * out.detach().mean(0)).requires_grad_()
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.graph, self.bank, self.leaf = Graph(), Bank(), Leaf()

    def forward(self, x):
        return self.graph(x), self.bank(x), self.leaf(x)


def main():
    job = relight.init()
    torch.manual_seed(30)
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            sum((out - 1).square().mean() for out in model(x)).backward()
            optimizer.step()
    finish(job, graph=net.graph.state_dict(), bank=net.bank.state_dict(), leaf=net.leaf.state_dict())


if __name__ == "__main__":
    main()
