"""Snapshot ensembles: a cyclic rate, and a copy of the weights at the end of each cycle."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

CYCLE = 5


def main():
    job = relight.init()
    torch.manual_seed(105)
    x = torch.randn(60, 6)
    data = TensorDataset(x, x.pow(2).sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    snapshots = []
    for step in training.steps(until=17):
        with step as (inputs, targets):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / 2 * (math.cos(math.pi * (step.number % CYCLE) / CYCLE) + 1) + 1e-4
            output = model(inputs)
            if snapshots:
                with torch.no_grad():
                    guide = sum(torch.func.functional_call(model.module, s, (inputs,)) for s in snapshots)
                loss = F.mse_loss(output, targets) + 0.1 * F.mse_loss(output, guide / len(snapshots))
            else:
                loss = F.mse_loss(output, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step.number + 1) % CYCLE == 0:
                snapshots.append(copy.deepcopy(model.module.state_dict()))
                snapshots = snapshots[-2:]
    finish(job, model=model, optimizer=optimizer, snapshots=[sorted(s.items()) for s in snapshots])


if __name__ == "__main__":
    main()
