"""Trains on data as people write it: a DataLoader of their own, workers that augment, two loaders at once."""

import argparse
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import relight


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self) -> None:
        self.generator = numpy.random.default_rng(5)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.full((16,), index / 96.0) + 0.1 * torch.randn(16)
        image *= random.choice((1.0, -1.0)) + numpy.random.rand() + self.generator.random()
        return image, index % 4


class Shifting(DataLoader[Any]):
    """An iteration of its own: a batch ahead, and moved."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        ahead = None
        for x, y in super().__iter__():
            if ahead is not None:
                yield ahead
            ahead = x + 1.0, y
        yield ahead


class Extra:
    """Reads on in a loader that was not passed to relight, now and then."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] | None = None

    def next(self) -> Any:
        if self.batches is None:
            self.batches = iter(DataLoader(Images(), batch_size=8))
        return next(self.batches)


EXTRAS = {"stray": Extra().next}  # found at run time, so that its code says nothing beforehand


def make_data(kind: str) -> Any:
    images = Images()
    sampler: DistributedSampler[Any] = DistributedSampler(images, shuffle=True, seed=3)
    if kind in ("own", "stray"):
        return Shifting(images, batch_size=8, sampler=sampler)
    if kind == "workers":
        return DataLoader(images, batch_size=8, sampler=sampler, num_workers=2)
    if kind == "stateful":
        return StatefulDataLoader(images, batch_size=8, sampler=sampler, num_workers=2)
    seeded = torch.Generator().manual_seed(100)
    return DataLoader(images, batch_size=8, sampler=sampler), DataLoader(
        images, batch_size=8, shuffle=True, generator=seeded
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", choices=["own", "workers", "stateful", "two", "stray"], required=True)
    options = parser.parse_args()
    relight.init()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer, data=make_data(options.data))
    seen = hashlib.sha256()
    for step in training.steps(until=options.steps):
        with step as batch:
            (x, y), *others = batch if options.data == "two" else (batch,)
            if options.data in EXTRAS and step.number % 5 == 4:
                x = x + EXTRAS[options.data]()[0]
            loss = F.cross_entropy(model(x), y) + sum(model(other).square().mean() for other, _ in others)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            print(f"committed {step.number}", flush=True)
            seen.update(loss.detach().numpy().tobytes())


if __name__ == "__main__":
    main()
