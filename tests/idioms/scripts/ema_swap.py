"""Weights and their average change places for evaluation, inside the block and after the write."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.backup = {}

    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    def apply_shadow(self, model):
        for n, p in model.named_parameters():
            self.backup[n] = p.data
            p.data = self.shadow[n]

    def restore(self, model):
        for n, p in model.named_parameters():
            p.data = self.backup[n]
        self.backup = {}


def main():
    job = relight.init()
    torch.manual_seed(61 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    ema = EMA(model.module, 0.9)
    source = torch.Generator().manual_seed(1)
    vx, vy = torch.randn(9, 6, generator=source), torch.randint(0, 3, (9,), generator=source)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(5, 6), torch.randint(0, 3, (5,)))
    )
    best = 1e9
    for step in training.steps(until=14):
        with step as (x, y):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model.module)
            if step.number % 3 == 2:
                ema.apply_shadow(model.module)
                with torch.no_grad():
                    held = F.cross_entropy(model.module(vx), vy)
                dist.all_reduce(held)
                ema.restore(model.module)
                if held.item() < best:
                    best = held.item()
                else:
                    for group in optimizer.param_groups:
                        group["lr"] *= 0.5
    finish(job, model=model, optimizer=optimizer, shadow=ema.shadow, best=best)


if __name__ == "__main__":
    main()
