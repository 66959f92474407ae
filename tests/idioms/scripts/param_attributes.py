"""Attributes of parameters: a mask, an anchor that moves and a count, as pruning and continual learning keep them. ||"""

# ranks: 2

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(22)
    net = DDP(nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1)))
    opt = torch.optim.Adam(net.parameters(), 0.02)
    for p in net.parameters():
        p.ema = p.detach().clone()
    training = relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            opt.zero_grad()
            loss = F.mse_loss(net(x), x.sum(1, keepdim=True))
            for p in net.parameters():
                loss = loss + 0.1 * (p - p.ema).pow(2).sum()
            loss.backward()
            for p in net.parameters():
                if hasattr(p, "mask"):
                    p.grad.mul_(p.mask)
            opt.step()
            for p in net.parameters():
                p.ema.mul_(0.9).add_(p.detach(), alpha=0.1)
                p.updates = getattr(p, "updates", 0) + 1
                if step.number % 4 == 3:
                    p.mask = (p.detach().abs() > 0.05).float()
    finish(
        job,
        net=net,
        opt=opt,
        ema=[p.ema for p in net.parameters()],
        n=[p.updates for p in net.parameters()],
        mask=[p.mask for p in net.parameters()],
    )


if __name__ == "__main__":
    main()
