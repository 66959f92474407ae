"""A layer keeps a bank of features in a plain attribute, which grows in each forward, beyond 1 MiB, up to a limit."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.bank = torch.zeros(0, 1024)

    def forward(self, x):
        out = x * self.scale
        if len(self.bank):
            out = out + 0.1 * self.bank.mean()
        self.bank = torch.cat([self.bank, out.detach().mean().expand(50, 1024) + torch.randn(50, 1024)])[-500:]
        return out


def main():
    job = relight.init()
    torch.manual_seed(30)
    model = DDP(Bank())
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
