"""A loop of epochs that stops early: validation over all ranks after each, patience, and a decay in its head."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(17)
    wanted = torch.randn(6, 1)
    held_out = torch.randn(30, 6)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    best, waited, losses = float("inf"), 0, []
    for epoch in training.epochs(12, steps_per_epoch=4):
        model.train()
        if epoch:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        for step in training.steps():
            with step as x:
                loss = (model(x) - x @ wanted).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            mine = held_out[job.rank :: job.world_size]
            error = (net(mine) - mine @ wanted).pow(2).mean()
        dist.all_reduce(error)
        losses.append(round(error.item(), 3))
        if error.item() < best - 1.0:
            best, waited = error.item(), 0
        else:
            waited += 1
        if waited == 2:
            break
    finish(job, model=model, optimizer=optimizer, losses=losses, epoch=epoch)


if __name__ == "__main__":
    main()
