"""Curriculum by competence: an infinite sampler that is a generator method, reading a shared schedule object that steps change."""

# ranks: 2
import bisect

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Competence:
    def __init__(self, c0=0.2, total=14):
        self.c0, self.total, self.value, self.bonus = c0, total, c0, 0.0

    def update(self, t):
        self.value = min(1.0, ((1 - self.c0**2) * t / self.total + self.c0**2) ** 0.5 + self.bonus)


class CurriculumStream:
    def __init__(self, difficulty, competence, size, seed):
        self.ids = np.argsort(difficulty)
        self.cdf = (np.arange(len(difficulty)) + 1) / len(difficulty)
        self.competence, self.size, self.rng = competence, size, np.random.Generator(np.random.PCG64(seed))
        self.pending = []

    def __iter__(self):
        return self

    def __next__(self):
        end = max(self.size, bisect.bisect_right(self.cdf, self.competence.value))
        while len(self.pending) < self.size:
            block = self.ids[:end].copy()
            self.rng.shuffle(block)
            self.pending.extend(int(i) for i in block)
        batch, self.pending = self.pending[: self.size], self.pending[self.size :]
        return batch


def main():
    job = relight.init()
    torch.manual_seed(24)
    x = torch.randn(40, 5)
    y = (x[:, 0] * x[:, 1] > 0).long()
    competence = Competence()
    stream = CurriculumStream(x.norm(dim=1).numpy(), competence, 6, seed=job.rank)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    training = relight.Training(model=model, optimizer=optimizer)
    ema = None
    for step in training.steps(until=16):
        with step:
            competence.update(step.number)
            ids = next(stream)
            loss = nn.functional.cross_entropy(model(x[ids]), y[ids])
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            ema = mean if ema is None else torch.lerp(ema, mean, 0.3)
            if mean < ema:
                competence.bonus += 0.02
            optimizer.step()
    finish(
        job,
        model=model,
        opt=optimizer,
        value=competence.value,
        bonus=competence.bonus,
        pending=stream.pending,
        rng=stream.rng.random(),
        ema=ema,
    )


if __name__ == "__main__":
    main()
