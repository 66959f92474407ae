"""Losses in an SQLite table in memory; from step 5 on their mean sets the learning rate."""

# ranks: 2
import sqlite3

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(2)
db = sqlite3.connect(":memory:")
db.execute("CREATE TABLE losses (step INTEGER, value REAL)")
model = DDP(nn.Linear(6, 4))
optimizer = torch.optim.Adam(model.parameters(), 0.05)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=16):
    with step as x:
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if step.number >= 4:
            db.execute("INSERT INTO losses VALUES (?, ?)", (step.number, mean.item()))
            (recent,) = db.execute(
                "SELECT avg(value) FROM (SELECT * FROM losses ORDER BY rowid DESC LIMIT 5)"
            ).fetchone()
            optimizer.param_groups[0]["lr"] = 0.05 * recent
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
rows = db.execute("SELECT step, value FROM losses").fetchall()
finish(job, model=model, optimizer=optimizer, rows=[list(row) for row in rows])
