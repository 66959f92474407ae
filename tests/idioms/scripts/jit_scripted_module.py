"""A model compiled by torch.jit.script: its executor runs a few calls to learn types, and optimizes after that."""

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.ih, self.hh = nn.Linear(6, 32), nn.Linear(8, 32)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, g, o = (self.ih(x) + self.hh(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm, self.out = Cell(), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(1), 8)
        c = torch.zeros(x.size(1), 8)
        for t in range(x.size(0)):
            h, c = self.cell(x[t], h, c)
        return self.out(F.gelu(self.norm(h)) * 0.5 + h.pow(2) / (1 + h.abs()))


def main():
    job = relight.init()
    torch.manual_seed(97)
    model = nn.parallel.DistributedDataParallel(torch.jit.script(Net()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(7, 5, 6), torch.randint(0, 3, (5,)))
    )
    for step in training.steps(until=14):
        with step as (x, y):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
