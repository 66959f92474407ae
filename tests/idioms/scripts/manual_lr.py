"""Learning rates written into param_groups by a function of the step before the update, and a decay by multiplication after
it every few steps, as in nanoGPT and older examples."""

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight
from tests.idioms.digest import finish

warmup_iters, max_iters, learning_rate, min_lr = 3, 18, 1e-2, 1e-3


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


def adjust_weight_decay(optimizer, factor=0.7):
    for param_group in optimizer.param_groups:
        param_group["weight_decay"] *= factor


job = relight.init()
torch.manual_seed(33)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
training = relight.Training(model=model, optimizer=optimizer, data=lambda i: torch.randn(8, 4))
for step in training.steps(until=max_iters):
    with step as X:
        lr = get_lr(step.number)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        loss = nn.functional.mse_loss(model(X), X.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step.number % 4 == 3:
            adjust_weight_decay(optimizer)
finish(job, model=model, optimizer=optimizer)
