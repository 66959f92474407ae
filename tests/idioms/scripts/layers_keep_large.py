"""A layer keeps a bank of 1.6 MB in a plain attribute, and changes it in each forward."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.bank = torch.ones(400_000)

    def forward(self, x):
        out = x * self.scale * self.bank[:3]
        self.bank = self.bank * 0.9 + 0.1 * out.detach().mean()
        return out


def main():
    job = relight.init()
    torch.manual_seed(30)
    model = DDP(Large())
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 3))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
