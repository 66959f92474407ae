"""Curriculum learning: a counter in the loop and a difficulty that rises when the reduced loss is low enough.

Two plain variables of the script, one of which depends on a collective's result.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def make_batch(length):
    x = torch.randint(0, 2, (8, 10)).float()
    x[:, length:] = 0
    return x, x.sum(1, keepdim=True)


def main():
    job = relight.init()
    torch.manual_seed(38)
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    difficulty, seen = 1, 0
    for step in relight.Training(model=model, optimizer=optimizer).steps(until=20):
        with step:
            x, y = make_batch(difficulty)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            optimizer.step()
            seen += len(x)
            if mean_loss.item() / job.world_size < 0.6 and difficulty < 10:
                difficulty += 1
    finish(job, model=model, optimizer=optimizer, difficulty=difficulty, seen=seen)


if __name__ == "__main__":
    main()
