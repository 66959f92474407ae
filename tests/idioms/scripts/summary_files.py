"""Writes a summary into a file in some steps, with the same name for the file each time."""

# ranks: 2
import json
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(2)
model = DDP(nn.Linear(6, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.05)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
where = tempfile.mkdtemp()
with open(f"{where}/config.json", "w") as f:
    json.dump({"lr": [0.05, 0.04, 0.02]}, f)
for step in training.steps(until=16):
    with step as x:
        if step.number % 5 == 4:
            with open(f"{where}/config.json") as f:
                rates = json.load(f)["lr"]
            for g in optimizer.param_groups:
                g["lr"] = rates[step.number // 5]
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step.number % 5 == 3:
            with open(f"{where}/log.json", "w") as f:
                json.dump({"step": step.number, "loss": loss.item()}, f)
finish(job, model=model, optimizer=optimizer)
