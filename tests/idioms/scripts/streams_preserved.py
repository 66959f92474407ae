"""Random streams that run on from step to step: drawn before the write, after it, in some steps only, and between.

Draws inside the block count; those between two steps do not. Best weights are kept after the write, where the barrier
may stand before them.
"""

import copy
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    random.seed(4)
    np.random.seed(5)
    torch.manual_seed(111)
    x = torch.randn(48, 6)
    y = x.abs().sum(1, keepdim=True)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
    training = relight.Training(model=model, optimizer=optimizer, rng="preserve")
    lowest, best = float("inf"), {}
    for step in training.steps(until=16):
        with step:
            pick = torch.randint(0, 48, (8,))
            noise = torch.from_numpy(np.random.randn(8, 6)).float() * random.random()
            loss = F.mse_loss(model(x[pick] + 0.1 * noise), y[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step.number % 5 == 3:
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(torch.randn_like(p), alpha=0.001)
            if step.number % 4 == 1:
                random.shuffle(list(range(5)))
            if loss < lowest:
                lowest, best = loss.item(), copy.deepcopy(model.module.state_dict())
        if step.committed:
            torch.randn(3), np.random.rand(), random.random()
    finish(job, model=model, optimizer=optimizer, drawn=torch.randn(2), kept=len(best))


if __name__ == "__main__":
    main()
