"""Arrays and tensors that are views of one memory, filled in place: storage of an agent."""

# ranks: 2
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Storage:
    def __init__(self, size):
        self.raw = np.zeros((size, 4), dtype=np.float32)
        self.observations = self.raw[:, :3]
        self.rewards = self.raw[:, 3]
        self.tensor = torch.from_numpy(self.raw)
        self.at = 0

    def put(self, row):
        self.raw[self.at % len(self.raw)] = row
        self.at += 1


def main():
    job = relight.init()
    torch.manual_seed(11)
    model = DDP(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    storage = Storage(8)
    window = storage.raw[2:6]
    shared = torch.zeros(4)
    mirror = shared.numpy()
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=14):
        with step:
            storage.put(np.random.randn(4).astype(np.float32))
            mirror += window.sum(0)
            x = torch.from_numpy(storage.observations.copy())
            y = storage.tensor[:, 3:] + shared.mean() * 0.01 + float(storage.rewards.mean())
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    finish(job, model=model, raw=storage.raw, window=window, shared=shared, at=storage.at)


if __name__ == "__main__":
    main()
