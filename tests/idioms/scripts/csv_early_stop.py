"""A notebook's loop: a CSV writer and its open file, metrics appended to a dict of lists after the step, patience that counts down
on the mean of the last values of that dict, everything at module level; best weights by copy.deepcopy."""

# ranks: 2
import copy
import csv
from statistics import mean

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(0)
X, y = torch.randn(96, 4), torch.randn(96, 1)
Xval, yval = torch.randn(24, 4), torch.randn(24, 1)
dataset = torch.utils.data.TensorDataset(X, y)
sampler = torch.utils.data.DistributedSampler(dataset)
train_loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
optimizer = optim.Adam(model.parameters(), lr=0.03)
training = relight.Training(model=model, optimizer=optimizer, data=train_loader)
history = {"loss": [], "val_loss": [], "lr": []}
patience, best_loss, best_weights, early = 3, None, None, False
f = open(f"log{job.rank}.csv", "w", newline="")
writer = csv.writer(f)
writer.writerow(["step", "loss"])
running = []
for step in training.steps(until=60):
    with step as (xb, yb):
        optimizer.zero_grad()
        loss = F.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
    running.append(loss.item())
    writer.writerow([step.number, loss.item()])
    if (step.number + 1) % len(train_loader) == 0:
        model.eval()
        with torch.no_grad():
            vloss = F.mse_loss(model.module(Xval), yval).item()
        model.train()
        history["loss"].append(mean(running))
        history["val_loss"].append(vloss)
        history["lr"].append(optimizer.param_groups[0]["lr"])
        running.clear()
        f.flush()
        if best_loss is None or vloss < best_loss:
            best_loss, patience = vloss, 3
            best_weights = copy.deepcopy(model.module.state_dict())
        else:
            patience -= 1
            if patience == 0:
                early = True
        if len(history["val_loss"]) >= 3 and mean(history["val_loss"][-2:]) > history["val_loss"][-3]:
            for g in optimizer.param_groups:
                g["lr"] *= 0.5
    if early:
        break
model.module.load_state_dict(best_weights)
finish(
    job, model=model, opt=optimizer, history=history["val_loss"], lr=history["lr"], best=best_loss, patience=patience
)
