"""A bandit chooses the augmentation of each batch: counts and values in dicts of a class, a decorated registry of operations,
softmax over rewards, rewards from the loss before and after the step, history written by a logging.Handler that is read back."""

# ranks: 2
import logging
import math
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

OPS = {}


def register(magnitude):
    def wrap(f):
        OPS[f.__name__] = (f, magnitude)
        return f

    return wrap


@register(0.3)
def jitter(x, m):
    return x + m * torch.randn_like(x)


@register(0.5)
def drop(x, m):
    return x * (torch.rand_like(x) > m)


@register(2.0)
def scale(x, m):
    return x * random.uniform(1 / m, m)


@register(1)
def roll(x, m):
    return x.roll(m, 1)


class Bandit:
    def __init__(self, names, c=0.5):
        self.counts, self.values, self.c, self.t = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0), c, 0

    def choose(self):
        self.t += 1
        fresh = [n for n, k in self.counts.items() if k == 0]
        if fresh:
            return random.choice(fresh)
        return max(self.counts, key=lambda n: self.values[n] + self.c * math.sqrt(math.log(self.t) / self.counts[n]))

    def update(self, name, reward):
        self.counts[name] += 1
        self.values[name] += (reward - self.values[name]) / self.counts[name]


class MemoryHandler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((record.levelname, record.getMessage()))


logger = logging.getLogger("bandit")
logger.setLevel(logging.INFO)
logger.propagate = False
memory = MemoryHandler()
logger.addHandler(memory)


def main():
    job = relight.init()
    torch.manual_seed(0)
    random.seed(0)
    net = DDP(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)))
    optimizer = optim.Adamax(net.parameters(), lr=0.02)
    bandit = Bandit(list(OPS))
    training = relight.Training(
        model=net, optimizer=optimizer, data=lambda n: (torch.randn(8, 6), torch.randint(0, 3, (8,)))
    )
    for step in training.steps(until=24):
        with step as (x, y):
            name = bandit.choose()
            f, m = OPS[name]
            if any(level == "WARNING" for level, _ in memory.records[-2:]):
                m = type(m)(m * 2) if isinstance(m, int) else m / 2
            loss = F.cross_entropy(net(f(x, m)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                after = F.cross_entropy(net.module(x), y)
            gain = torch.stack([loss.detach() - after])
            dist.all_reduce(gain)
            bandit.update(name, gain.item())
            logger.log(
                logging.WARNING if gain.item() < 0 else logging.INFO, "%d %s %.3f", step.number, name, gain.item()
            )
    finish(job, net=net, opt=optimizer, counts=bandit.counts, values=bandit.values, t=bandit.t, records=memory.records)


if __name__ == "__main__":
    main()
