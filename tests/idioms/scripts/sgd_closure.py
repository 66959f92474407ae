"""optimizer.step(closure) with plain SGD: forward, backward and DDP's collectives run inside the optimizer's step."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(25)
model = DDP(nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 4))
for step in training.steps(until=16):
    with step as input:

        def closure():
            optimizer.zero_grad()
            loss = (model(input) - input.prod(1, keepdim=True)).pow(2).mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        step.report(loss.detach())
finish(job, model=model, optimizer=optimizer)
