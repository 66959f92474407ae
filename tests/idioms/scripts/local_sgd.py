"""Local SGD: each rank trains alone, and parameters are averaged every fourth step. Ranks differ in between, so no rank
holds another one's state: relight cannot protect that, and has to say so."""

import torch
import torch.distributed as dist
import torch.nn as nn

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(62)
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5)).steps(until=16):
    with step as x:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()
        if (step.number + 1) % 4 == 0:
            with torch.no_grad():
                for p in model.parameters():
                    dist.all_reduce(p)
                    p /= job.world_size
finish(job, model=model, optimizer=optimizer)
