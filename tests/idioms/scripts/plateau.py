"""ReduceLROnPlateau fed with an all-reduced validation loss after the update."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(43)
    val_x = torch.randn(20, 5)
    net = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    scheduler = ReduceLROnPlateau(optimizer, "min", factor=0.5, patience=1, threshold=0.05)
    training = relight.Training(model=net, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=18):
        with step as x:
            loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                shard = val_x[job.rank :: job.world_size]
                val_loss = (net.module(shard) - shard.sum(1, keepdim=True)).pow(2).mean()
                dist.all_reduce(val_loss)
            scheduler.step(val_loss / job.world_size)
    finish(job, net=net, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
