"""Pruning by a mask that is made once, after the write of one step, and used in all later ones (SNIP-like)."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

CHOSEN_AT = 7


def main():
    job = relight.init()
    torch.manual_seed(78)
    x = torch.randn(60, 8)
    data = TensorDataset(x, x.abs().sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    mask = None
    rows = {}
    for step in training.steps(until=16):
        with step as (inputs, targets):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            if step.number > CHOSEN_AT:
                model.module[0].weight.grad.mul_(mask)
                model.module[2].weight.grad.mul_(rows["kept"])
            optimizer.step()
            if step.number == CHOSEN_AT:
                saliency = (model.module[0].weight * model.module[0].weight.grad).abs()
                mask = (saliency > saliency.mean()).float()
                rows["kept"] = mask.sum(1).clamp(max=1.0)
    finish(job, model=model, optimizer=optimizer, mask=mask.sum().item())


if __name__ == "__main__":
    main()
