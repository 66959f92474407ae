"""A thread of the script's own makes batches ahead, and the step takes them out of a queue."""

# ranks: 2
import queue
import threading

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Prefetcher:
    def __init__(self, seed):
        self.queue = queue.Queue(maxsize=2)
        self.generator = torch.Generator().manual_seed(seed)
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            self.queue.put(torch.randn(6, 4, generator=self.generator))

    def next(self):
        return self.queue.get()


def main():
    job = relight.init()
    torch.manual_seed(59)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer)
    prefetcher = Prefetcher(job.rank)
    for step in training.steps(until=12):
        with step:
            x = prefetcher.next()
            optimizer.zero_grad()
            (model(x) - x.roll(1, 0)).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
