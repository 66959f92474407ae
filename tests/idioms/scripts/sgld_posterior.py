"""Langevin dynamics: noise on the weights after the step, and a running mean of samples after burn-in."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(106)
    x = torch.randn(60, 4)
    data = TensorDataset(x, x[:, :1])
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    generator = torch.Generator().manual_seed(9)
    mean, count = None, 0
    for step in training.steps(until=15):
        with step as (inputs, targets):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, generator=generator), alpha=0.01)
                if step.number >= 6:
                    flat = nn.utils.parameters_to_vector(model.parameters())
                    count += 1
                    mean = flat.clone() if mean is None else mean + (flat - mean) / count
    finish(job, model=model, optimizer=optimizer, mean=mean, count=count)


if __name__ == "__main__":
    main()
