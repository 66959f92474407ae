"""A plateau that loads the best weights back, with a smaller rate: state that is kept in a dict of the script."""

# ranks: 2
import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(25)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
optimizer = torch.optim.Adam(model.parameters(), 0.05)
val = torch.randn(12, 6)
state = {"best_loss": float("inf"), "best": None, "bad": 0, "reloads": 0}
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=24):
    with step as x:
        if step.number % 2 == 0:
            with torch.no_grad():
                val_loss = (model.module(val) - val.sin().sum(1, keepdim=True)).square().mean().item()
            if val_loss < state["best_loss"]:
                state["best_loss"], state["bad"] = val_loss, 0
                state["best"] = {
                    "model": copy.deepcopy(model.module.state_dict()),
                    "optimizer": copy.deepcopy(optimizer.state_dict()),
                }
            else:
                state["bad"] += 1
            if state["bad"] >= 2:
                model.module.load_state_dict(state["best"]["model"])
                optimizer.load_state_dict(state["best"]["optimizer"])
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5 ** (state["reloads"] + 1)
                state["bad"], state["reloads"] = 0, state["reloads"] + 1
        optimizer.zero_grad()
        (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
finish(job, model=model, optimizer=optimizer, best=state["best_loss"], reloads=state["reloads"])
