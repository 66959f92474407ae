"""SimCLR: two random views of a batch, embeddings of all ranks gathered with gradients, NT-Xent loss, SyncBatchNorm-like
statistics by hand. The gather is a collective in forward, with a backward of its own."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x)
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        grads = torch.stack(grads)
        dist.all_reduce(grads)
        return grads[dist.get_rank()]


class TwoViews(Dataset):
    def __init__(self):
        self.images = torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(5))

    def augment(self, x):
        x = x.roll(int(torch.randint(0, 8, ())), -1)
        return x + 0.1 * torch.randn_like(x)

    def __getitem__(self, index):
        return self.augment(self.images[index]), self.augment(self.images[index])

    def __len__(self):
        return len(self.images)


def nt_xent(z, temperature=0.5):
    sim = z @ z.T / temperature
    sim.fill_diagonal_(-1e9)
    n = len(z) // 2
    return F.cross_entropy(sim, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def main():
    job = relight.init()
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    model = DDP(nn.Sequential(backbone, head))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
    dataset = TwoViews()
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, job.world_size, job.rank), drop_last=True)
    training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step in training.steps(until=18):
        with step as (x1, x2):
            z = F.normalize(model(torch.cat([x1, x2])), dim=1)
            z1, z2 = z.chunk(2)
            z1, z2 = torch.cat(GatherLayer.apply(z1)), torch.cat(GatherLayer.apply(z2))
            loss = nt_xent(torch.cat([z1, z2]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    finish(job, model=model, optimizer=optimizer, scheduler=scheduler)


if __name__ == "__main__":
    main()
