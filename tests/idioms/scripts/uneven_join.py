"""Uneven inputs: ranks have different numbers of batches, under DDP's join()."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(2)
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(3, 4))
for step in training.steps(until=10):
    with step as x:
        with model.join():
            for k in range(1 + job.rank):
                optimizer.zero_grad()
                model(x + k).square().mean().backward()
                optimizer.step()
finish(job, model=model, optimizer=optimizer)
