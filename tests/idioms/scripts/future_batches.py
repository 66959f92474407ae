"""The next batch is made by a pool's thread while this one trains: a Future goes on from step to step."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


class Prefetcher:
    def __init__(self, rank):
        self.rank, self.cursor = rank, 0
        self.pool = ThreadPoolExecutor(1)
        self.pending = self.pool.submit(self.load, 0)

    def load(self, n):
        source = torch.Generator().manual_seed(100 * self.rank + n)
        return torch.randn(4, 6, generator=source), torch.randint(0, 3, (4,), generator=source)

    def next(self):
        batch = self.pending.result()
        self.cursor += 1
        self.pending = self.pool.submit(self.load, self.cursor)
        return batch


def main():
    job = relight.init()
    torch.manual_seed(29)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 3))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
    prefetcher = Prefetcher(job.rank)
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=14):
        with step:
            x, y = prefetcher.next()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, cursor=prefetcher.cursor)


if __name__ == "__main__":
    main()
