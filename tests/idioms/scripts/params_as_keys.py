"""Scales kept in a dict by the parameter itself, filled when gradients first come."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(7)
    model = DDP(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    by_parameter = {}
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for p in model.parameters():
                if p not in by_parameter:
                    by_parameter[p] = torch.ones_like(p)
                by_parameter[p] = by_parameter[p] * 0.99 + p.grad.abs()
                p.grad = p.grad / by_parameter[p]
            optimizer.step()
    finish(
        job,
        model=model,
        scale=[by_parameter[p] for p in model.parameters()],
    )


if __name__ == "__main__":
    main()
