"""Pretraining and finetuning, each with a loop of its own."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(22)
    body = nn.Linear(6, 8)
    model = DDP(nn.Sequential(body, nn.Tanh(), nn.Linear(8, 6)))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=6):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
    tuned = DDP(nn.Sequential(body, nn.Tanh(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(tuned.parameters(), 0.05)
    training = relight.Training(model=tuned, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=6):
        with step as x:
            optimizer.zero_grad()
            (tuned(x) - x[:, :2].sin()).square().mean().backward()
            optimizer.step()
    finish(job, model=tuned, optimizer=optimizer)


if __name__ == "__main__":
    main()
