"""Layers assign values of every kind to their attributes, from the seventh step on."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish
from tests.idioms.kinds import ITERATORS, KINDS, chosen, word


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.kind, self.held = kind, kind.start()
        self.calls = 0

    def forward(self, x):
        out = x * self.scale * (1 + 0.01 * self.kind.number(self.held))
        self.calls += 1
        if self.calls > 6:
            self.held = self.kind.update(self.held, out.detach().mean().clamp(-3, 3).item())
        return out


class Net(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleDict({word(name): Layer(kind) for name, kind in kinds.items()})

    def forward(self, x):
        return sum((layer(x) - 1).square().mean() for layer in self.layers.values())


def main():
    job = relight.init()
    torch.manual_seed(33)
    net = Net(chosen(leave_out=ITERATORS))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=16):
        with step as x:
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    finish(job, **{name: layer.scale for name, layer in net.layers.items()})


if __name__ == "__main__":
    main()
