"""Functions compiled by torch.jit.script, as in Megatron and EfficientNet: their executor learns from the first calls."""

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


@torch.jit.script
def bias_gelu(bias, y):
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@torch.jit.script
def swish(x):
    return x.mul(torch.sigmoid(x))


@torch.jit.script
def lstm_cell(gates: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.ih, self.hh, self.out = nn.Linear(6, 32), nn.Linear(8, 32), nn.Linear(8, 3)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        h = c = torch.zeros(x.size(1), 8)
        for t in range(x.size(0)):
            h, c = lstm_cell(self.ih(x[t]) + self.hh(h), c)
        return self.out(swish(bias_gelu(self.bias, h)))


def main():
    job = relight.init()
    torch.manual_seed(97)
    model = nn.parallel.DistributedDataParallel(Net())
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
