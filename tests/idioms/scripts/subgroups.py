"""Contrast within subgroups: groups of two ranks, chosen where they are used by `groups[job.rank // 2]`; DDP over all.

A promoted standby must act in the group of the rank that it takes.
"""

# ranks: 4
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    groups = [dist.new_group([first, first + 1]) for first in range(0, job.world_size, 2)]
    torch.manual_seed(51)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6)).steps(until=16):
        with step as x:
            z = F.normalize(model(x), dim=1)
            group = groups[job.rank // 2]
            center = z.detach().mean(0)
            dist.all_reduce(center, group=group)
            spread = (z - center / 2).pow(2).sum(1).mean()
            loss = -spread + F.mse_loss(z @ z.T, torch.eye(len(z)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
