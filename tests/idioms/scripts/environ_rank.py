"""Asks the environment for the rank, at the beginning and in each step."""

# ranks: 2
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def is_main():
    return int(os.environ.get("RANK", 0)) == 0


def main():
    job = relight.init()
    world = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(13)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    data = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
    logged = []
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=14):
        with step:
            rank = int(os.environ["RANK"])
            x = data[(step.number * world + rank) * 3 % 45 :][:3]
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
            optimizer.step()
            if is_main():
                logged.append(loss.item())
    finish(job, model=model, optimizer=optimizer, logged=logged)


if __name__ == "__main__":
    main()
