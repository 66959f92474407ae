"""Dates, fractions, ranges, slices, paths, sizes, dtypes and other plain values go from step to step."""

# ranks: 2
from datetime import timedelta
from fractions import Fraction
from pathlib import PurePath

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(17)
    model = DDP(nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clock, left, part = timedelta(0), range(20), slice(0, 3)
    share, size, kind = Fraction(1, 2), torch.Size([6, 5]), torch.float32
    where, chain, user = PurePath("a"), {"a": 1.0}, {"k": 0.0}
    numbers = [0.0] * 3
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=14):
        with step:
            x = torch.randn(size, dtype=kind).float()
            clock += timedelta(seconds=1.5)
            left = left[1:]
            part = slice(part.start, min(part.stop + 1, 5) if step.number % 3 else 2)
            share = share * Fraction(2, 3) + 1
            size = torch.Size([4 + step.number % 3, 5])
            kind = torch.float64 if kind is torch.float32 else torch.float32
            where = where / "b" if step.number % 4 else PurePath("a")
            chain["a"] = chain["a"] * 0.9 + len(where.parts)
            user["k"] += 0.5
            numbers[step.number % 3] += chain["a"]
            optimizer.zero_grad()
            scale = clock.total_seconds() / 20 + len(left) / 20 + float(share) + user["k"] / 10 + sum(numbers) / 50
            (model(x)[:, part] * scale - x[:, part]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, clock=clock.total_seconds(), left=len(left), share=float(share), numbers=list(numbers))


if __name__ == "__main__":
    main()
