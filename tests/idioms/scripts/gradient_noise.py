"""Noise on gradients from a torch.Generator of the script's own, which goes from step to step; the same on all ranks."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(36)
noise_generator = torch.Generator()
noise_generator.manual_seed(1234)

model = DDP(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5))
for step in training.steps(until=16):
    with step as x:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        sigma = 0.01 / (1 + step.number) ** 0.55
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=noise_generator), alpha=sigma)
        optimizer.step()
finish(job, model=model, optimizer=optimizer, noise=noise_generator)
