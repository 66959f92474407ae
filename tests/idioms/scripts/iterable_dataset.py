"""An IterableDataset with a length: a stream divided among ranks by islice, with a shuffle buffer of its own generator."""

import itertools

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

import relight
from tests.idioms.digest import finish


class Stream(IterableDataset):
    def __init__(self, rank, world_size, length=60):
        self.rank, self.world_size, self.length = rank, world_size, length

    def samples(self):
        for i in itertools.count():
            g = torch.Generator().manual_seed(i)
            yield torch.randn(5, generator=g)

    def __iter__(self):
        shuffle = torch.Generator().manual_seed(99)
        buffer = []
        for x in itertools.islice(self.samples(), self.rank, self.length * self.world_size, self.world_size):
            if len(buffer) < 8:
                buffer.append(x)
                continue
            i = int(torch.randint(0, 8, (), generator=shuffle))
            yield buffer[i]
            buffer[i] = x
        yield from buffer

    def __len__(self):
        return self.length


job = relight.init()
torch.manual_seed(56)
loader = DataLoader(Stream(job.rank, job.world_size), batch_size=5)
model = DDP(nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 5)))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in relight.Training(model=model, optimizer=optimizer, data=loader).steps(until=18):
    with step as x:
        (model(x) - x.flip(1)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
finish(job, model=model, optimizer=optimizer)
