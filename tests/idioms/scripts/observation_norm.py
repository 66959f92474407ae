"""A policy whose observations are normalized by a module without parameters: each rank keeps the mean of its own."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(37)
normalizer = nn.BatchNorm1d(6, affine=False)
policy = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
optimizer = torch.optim.Adam(policy.parameters(), 0.01)
training = relight.Training(
    model={"policy": policy, "normalizer": normalizer}, optimizer=optimizer, data=lambda n: 3 * torch.randn(8, 6) + 1
)
for step in training.steps(until=16):
    with step as observations:
        actions = policy(normalizer(observations))
        reward = -(actions - observations[:, :2].tanh()).square().mean()
        optimizer.zero_grad()
        (-reward).backward()
        optimizer.step()
finish(job, policy=policy, normalizer=normalizer, optimizer=optimizer)
