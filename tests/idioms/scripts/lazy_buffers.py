"""Buffers that forward makes when it needs them, a mask that grows with the longest input, and lazy layers."""

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.LazyLinear(3 * dim)
        self.register_buffer("mask", None, persistent=False)
        self.seen = None

    def forward(self, x):
        t = x.shape[1]
        if self.mask is None or self.mask.shape[0] < t:
            self.register_buffer("mask", torch.triu(torch.ones(t, t, dtype=torch.bool), 1), persistent=False)
        if not hasattr(self, "temperature"):
            self.register_buffer("temperature", torch.ones(()))
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5 / self.temperature
        scores = scores.masked_fill(self.mask[:t, :t], float("-inf"))
        if self.training:
            self.temperature = 0.95 * self.temperature + 0.05 * (1 + scores.detach().amax() / 10)
        return scores.softmax(-1) @ v


def main():
    job = relight.init()
    torch.manual_seed(43)
    net = nn.Sequential(Attention(8), nn.LazyLinear(4))
    net(torch.zeros(1, 2, 6))
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.02)

    def data(n):
        return torch.randn(3, 2 + (n * 7) % 5, 6), torch.randint(0, 4, (3,))

    training = relight.Training(model=model, optimizer=optimizer, data=data)
    for step in training.steps(until=14):
        with step as (x, y):
            loss = F.cross_entropy(model(x).mean(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, temperature=net[0].temperature, mask=net[0].mask)


if __name__ == "__main__":
    main()
