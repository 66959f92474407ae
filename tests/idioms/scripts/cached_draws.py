"""A sample is augmented the first time that it is loaded, and remembered by functools.lru_cache."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish

SAMPLES = 12


@functools.lru_cache(maxsize=None)
def augmented(index):
    source = torch.Generator().manual_seed(index)
    return torch.randn(8, generator=source) + 0.3 * torch.randn(8)


@functools.cache
def teacher(index):
    return int(torch.randint(4, ()).item())


def main():
    job = relight.init()
    torch.manual_seed(11 + job.rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: [(n * 5 + i) % SAMPLES for i in range(4)]
    )
    for step in training.steps(until=16):
        with step as indices:
            x = torch.stack([augmented(int(i)) for i in indices])
            y = torch.tensor([teacher(int(i)) for i in indices])
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, seen=[augmented(i) for i in range(SAMPLES)])


if __name__ == "__main__":
    main()
