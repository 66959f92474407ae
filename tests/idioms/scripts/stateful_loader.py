"""torchdata's StatefulDataLoader with shuffling: its position is state of its rank."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(57)
    dataset = TensorDataset(torch.randn(90, 5))
    sampler = DistributedSampler(dataset, num_replicas=job.world_size, rank=job.rank, shuffle=True)
    loader = StatefulDataLoader(dataset, batch_size=5, sampler=sampler, num_workers=0)
    model = DDP(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[4],
    )
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step in training.steps(until=16):
        with step as (x,):
            (model(x) - x.norm(dim=1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
