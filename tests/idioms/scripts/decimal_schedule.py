"""A learning rate in decimals, whose context becomes more exact from step 5 on."""

# ranks: 2
import decimal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(3)
decimal.getcontext().prec = 6
model = DDP(nn.Linear(6, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.05)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=16):
    with step as x:
        if step.number >= 5:
            decimal.getcontext().prec += 1
        rate = decimal.Decimal(1) / decimal.Decimal(7 + step.number)
        optimizer.param_groups[0]["lr"] = float(rate) * 0.3
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finish(job, model=model, optimizer=optimizer, prec=decimal.getcontext().prec)
