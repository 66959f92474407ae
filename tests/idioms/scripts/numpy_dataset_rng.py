"""Augmentation by a generator that the dataset keeps, in a plain DataLoader with a generator of its own."""

# ranks: 2
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, random_split

import relight
from tests.idioms.digest import finish


class Augmented(Dataset):
    def __init__(self, n, seed):
        self.rng = np.random.RandomState(seed)
        self.x = self.rng.randn(n, 3, 6).astype(np.float32)
        self.y = self.rng.randint(0, 4, n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if self.rng.rand() < 0.5:
            x = x[:, ::-1].copy()
        return torch.from_numpy(x + 0.1 * self.rng.randn(*x.shape).astype(np.float32)), int(self.y[i])


def main():
    job = relight.init()
    torch.manual_seed(33)
    train, held_out = random_split(Augmented(60, 5), [48, 12], generator=torch.Generator().manual_seed(42))
    weights = torch.ones(len(train), dtype=torch.double)
    sampler = WeightedRandomSampler(weights, len(train), generator=torch.Generator().manual_seed(job.rank))
    loader = DataLoader(train, batch_size=6, sampler=sampler, generator=torch.Generator().manual_seed(7))
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=2 * len(loader)):
        with step as (x, y):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
