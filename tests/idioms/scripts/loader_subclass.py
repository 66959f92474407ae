"""A DataLoader subclass with its own __iter__ (it pads and moves each batch, and repeats hard ones), as in fast loaders."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import relight
from tests.idioms.digest import finish


class PrefetchLoader(DataLoader):
    """Normalizes on the fly and yields each batch together with the one before."""

    def __iter__(self):
        previous = None
        for x, y in super().__iter__():
            x = (x - 0.5) * 2
            yield (x if previous is None else 0.8 * x + 0.2 * previous), y
            previous = x


class Digits(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.x, self.y = torch.rand(90, 7, generator=g), torch.randint(0, 3, (90,), generator=g)

    def __len__(self):
        return 90

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def collate(samples):
    return torch.stack([s[0] for s in samples]), torch.tensor([int(s[1]) for s in samples])


def main():
    job = relight.init()
    torch.manual_seed(54)
    dataset = Digits()
    loader = PrefetchLoader(
        dataset, batch_size=6, sampler=DistributedSampler(dataset, job.world_size, job.rank), collate_fn=collate
    )
    model = DDP(nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=16):
        with step as (x, y):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
