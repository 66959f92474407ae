"""A custom autograd function that keeps statistics in module globals and a class attribute, read by the next forward. ||"""

# ranks: 2

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

STATS = {"max": 1.0, "calls": 0}


class Quant(torch.autograd.Function):
    scale = 1.0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        s = STATS["max"] / 7
        return torch.round(x / s) * s * Quant.scale

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        STATS["max"] = 0.9 * STATS["max"] + 0.1 * float(x.detach().abs().max())
        STATS["calls"] += 1
        Quant.scale = 1.0 + 0.01 * (STATS["calls"] % 5)
        return g


def main():
    job = relight.init()
    torch.manual_seed(27)
    lin, head = nn.Linear(5, 8), nn.Linear(8, 1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.head = lin, head

        def forward(self, x):
            return self.head(Quant.apply(self.lin(x)))

    net = DDP(Net())
    opt = torch.optim.SGD(net.parameters(), 0.1)
    training = relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            opt.zero_grad()
            F.mse_loss(net(x), x.sum(1, keepdim=True)).backward()
            opt.step()
    finish(job, net=net, opt=opt, stats=STATS, scale=Quant.scale)


if __name__ == "__main__":
    main()
