"""Losses of two tasks weighted by their running means, kept in a dict of plain numbers that goes from step to step."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def reduce_mean(value):
    t = torch.tensor(value)
    dist.all_reduce(t)
    return (t / dist.get_world_size()).item()


def main():
    job = relight.init()
    torch.manual_seed(32)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    averages = {"a": 1.0, "b": 1.0}
    for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6)).steps(until=18):
        with step as x:
            out = model(x)
            losses = {"a": (out[:, 0] - x.sum(1)).pow(2).mean(), "b": (out[:, 1] - x.prod(1)).abs().mean()}
            total = sum(losses[k] / averages[k] for k in losses)
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            for k, v in losses.items():
                averages[k] = 0.8 * averages[k] + 0.2 * reduce_mean(v.item())
    finish(job, model=model, optimizer=optimizer, averages=averages)


if __name__ == "__main__":
    main()
