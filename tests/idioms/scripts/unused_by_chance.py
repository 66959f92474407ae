"""find_unused_parameters=True: experts of which each rank uses others in each step, chosen by random.sample."""

import random

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class LayerDrop(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)
        self.uses = [0] * depth

    def forward(self, x):
        for index in sorted(random.sample(range(len(self.layers)), 2)):
            self.uses[index] += 1
            x = x + torch.tanh(self.layers[index](x))
        return self.head(x)


def main():
    job = relight.init()
    random.seed(4 + job.rank)
    torch.manual_seed(4)
    net = LayerDrop(8, 5)
    model = DDP(net, find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(5, 8))
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x.prod(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
