"""A thread of the script's that changes what the script holds all the time: statistics, a cache, a list of messages."""

import random
import threading
from collections import deque

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

MESSAGES = deque(maxlen=50)
LATEST = {}


class Monitor:
    counts = {}

    def __init__(self):
        self.names, self.values, self.tensors = set(), [], {}
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        rng = random.Random(0)
        number = 0
        while not self.done.wait(0.0005):
            for _ in range(20):
                number += 1
                key, other = rng.randrange(60), rng.randrange(60)
                self.names.add(key)
                self.names.discard(other)
                self.values.append(number)
                if len(self.values) > 40:
                    self.values.clear()
                self.tensors[key] = torch.full((3,), float(number))
                self.tensors.pop(other, None)
                MESSAGES.append((key, number))
                for table in (LATEST, Monitor.counts, self.__dict__):
                    table[f"of_{key}"] = number
                    table.pop(f"of_{other}", None)


def main():
    job = relight.init()
    torch.manual_seed(11)
    model = DDP(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(4, 8))
    monitor = Monitor()
    monitor.thread.start()
    for step in training.steps(until=18):
        with step as x:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            LATEST["step"] = step.number
            seen = len(MESSAGES), len(monitor.values), len(monitor.names)
    monitor.done.set()
    monitor.thread.join()
    assert seen[0]
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
