"""Rays in an order of their own, drawn again at the end of each pass: NeRF's batches."""

# ranks: 2
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    rays = torch.rand(40, 3, generator=torch.Generator().manual_seed(1 + job.rank))
    target = rays.sin()
    both = torch.cat([rays, target], 1)
    rand_idx = torch.randperm(both.shape[0])
    both = both[rand_idx]
    i_batch = 0
    N_rand = 12
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=16):
        with step:
            batch = both[i_batch : i_batch + N_rand]
            i_batch += N_rand
            if i_batch >= both.shape[0]:
                rand_idx = torch.randperm(both.shape[0])
                both = both[rand_idx]
                i_batch = 0
            loss = F.mse_loss(model(batch[:, :3]), batch[:, 3:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            new_lrate = 5e-3 * 0.1 ** (step.number / 20)
            for param_group in optimizer.param_groups:
                param_group["lr"] = new_lrate
    finish(job, model=model, optimizer=optimizer, i_batch=i_batch, both=both)


if __name__ == "__main__":
    main()
