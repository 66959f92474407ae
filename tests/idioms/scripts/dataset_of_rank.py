"""Data made from the rank where it is handed over: a dataset that knows its part, a sampler of the script's own."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

import relight
from tests.idioms.digest import finish


class Part(Dataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def __len__(self):
        return 24

    def __getitem__(self, index):
        number = index * self.world_size + self.rank
        return torch.randn(5, generator=torch.Generator().manual_seed(number))


class Stride(Sampler):
    def __init__(self, length, rank):
        self.length, self.start = length, 3 * rank

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([(self.start + 5 * k) % self.length for k in range(self.length)])


def main():
    job = relight.init()
    torch.manual_seed(89)
    model = DDP(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 5)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = relight.Training(
        model=model,
        optimizer=optimizer,
        data=DataLoader(Part(job.rank, job.world_size), batch_size=4, sampler=Stride(24, job.rank), drop_last=True),
    )
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
