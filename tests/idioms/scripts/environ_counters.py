"""Values that steps keep in the environment: a counter, and a temperature that is cooled from step 6 on."""

# ranks: 2
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

os.environ.setdefault("TEMP", "1.0")


def cool():
    os.environ["TEMP"] = repr(float(os.environ["TEMP"]) * 0.9)


job = relight.init()
torch.manual_seed(1)
model = DDP(nn.Linear(6, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.05)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=16):
    with step as x:
        if step.number >= 6:
            cool()
        loss = F.cross_entropy(model(x) / float(os.environ["TEMP"]), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finish(job, model=model, optimizer=optimizer, temp=os.environ["TEMP"])
