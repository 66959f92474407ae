"""Mixtures of corpora: objects in a dict by name, made from the rank, of which each step reads another one: a place, a
generator, a set of what was seen."""

# ranks: 2
import random

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

NAMES = ["web", "books", "code", "wiki", "mail"]


class Corpus:
    def __init__(self, number, rank, world_size):
        self.tokens = np.random.RandomState(number).rand(400).astype(np.float32)
        self.place, self.stride = rank * 8, world_size * 8
        self.numpy, self.python = np.random.default_rng(rank), random.Random(rank)
        self.torch = torch.Generator().manual_seed(rank)
        self.seen, self.recent, self.total = {rank}, [rank], np.zeros(2) + rank

    def next(self):
        if self.place + 8 > len(self.tokens):
            self.place %= self.stride
        row = self.tokens[self.place : self.place + 8] + self.numpy.normal() + self.python.random()
        self.place += self.stride
        self.seen.add(max(self.seen) + 2)
        self.recent.append(len(self.seen))
        self.total += row[:2]
        return torch.from_numpy(row).float() + torch.rand(8, generator=self.torch) + self.recent[0] + max(self.seen)


def main():
    job = relight.init()
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    corpora = {name: Corpus(number, job.rank, job.world_size) for number, name in enumerate(NAMES)}
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=12):
        with step:
            x = torch.stack([corpora[NAMES[step.number % 5]].next() for _ in range(4)])
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    kept = {name: [each.place, each.seen, each.recent, each.total, each.torch] for name, each in corpora.items()}
    finish(job, model=model, optimizer=optimizer, kept=kept, drawn=[each.numpy.random() for each in corpora.values()])


if __name__ == "__main__":
    main()
