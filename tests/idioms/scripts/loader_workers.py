"""Worker processes that augment at random, from torch's, numpy's and Python's streams (seeded by worker_init_fn)."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import relight
from tests.idioms.digest import finish


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


class Augmented(Dataset):
    def __init__(self):
        self.images = torch.randn(72, 1, 6, 6, generator=torch.Generator().manual_seed(9))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        x = self.images[i]
        if random.random() < 0.5:
            x = x.flip(-1)
        x = x * np.float32(np.random.uniform(0.8, 1.2))
        return x + 0.1 * torch.randn_like(x), i % 4


def main():
    job = relight.init()
    torch.manual_seed(55)
    dataset = Augmented()
    sampler = DistributedSampler(dataset, job.world_size, job.rank)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1, worker_init_fn=seed_worker)
    model = DDP(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=14):
        with step as (images, labels):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
