"""Magnitude pruning in steps: masks are buffers that change now and then, weights are masked before and after the update."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class MaskedLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class Pruner:
    def __init__(self, model, final=0.6, start=4, end=14, every=2):
        self.layers = [m for m in model.modules() if isinstance(m, MaskedLinear)]
        self.final, self.start, self.end, self.every = final, start, end, every
        self.current_sparsity = 0.0

    def sparsity(self, number):
        progress = min(max((number - self.start) / (self.end - self.start), 0.0), 1.0)
        return self.final * (1 - (1 - progress) ** 3)

    def step(self, number):
        if number < self.start or number % self.every:
            return
        self.current_sparsity = self.sparsity(number)
        for layer in self.layers:
            k = int(self.current_sparsity * layer.weight.numel())
            if k:
                threshold = layer.weight.detach().abs().flatten().kthvalue(k).values
                layer.mask.copy_((layer.weight.abs() > threshold).float())
                layer.weight.data *= layer.mask


def main():
    job = relight.init()
    torch.manual_seed(60)
    model = DDP(nn.Sequential(MaskedLinear(6, 16), nn.ReLU(), MaskedLinear(16, 16), nn.ReLU(), MaskedLinear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pruner = Pruner(model)
    for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6)).steps(until=18):
        with step as x:
            pruner.step(step.number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
            optimizer.step()
            for layer in pruner.layers:
                layer.weight.data.mul_(layer.mask)
    finish(job, model=model, optimizer=optimizer, sparsity=pruner.current_sparsity)


if __name__ == "__main__":
    main()
