"""An IterableDataset made of composed generator functions: shards, a shuffle buffer, batches with a remainder, a resampled stream."""

# ranks: 2
import random
from functools import partial, reduce

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

import relight
from tests.idioms.digest import finish


def shards(n, rank, world, seed):
    epoch = 0
    while True:
        order = list(range(n))
        random.Random(seed + epoch).shuffle(order)
        yield from ((epoch, s) for s in order[rank::world])
        epoch += 1


def expand(src):
    for epoch, shard in src:
        rng = random.Random(shard)
        for i in range(5):
            yield {
                "key": f"{shard}-{i}",
                "x": [rng.gauss(0, 1) for _ in range(6)],
                "y": rng.randrange(3),
                "epoch": epoch,
            }


def shuffle(src, size, seed):
    rng, buf = random.Random(seed), []
    for sample in src:
        buf.append(sample)
        if len(buf) >= size:
            i = rng.randrange(len(buf))
            buf[i], buf[-1] = buf[-1], buf[i]
            yield buf.pop()


def augment(src):
    for sample in src:
        if random.random() < 0.5:
            sample["x"] = [v * (1 + 0.1 * torch.rand(()).item()) for v in sample["x"]]
        yield sample


def batched(src, size):
    batch = []
    for sample in src:
        batch.append(sample)
        if len(batch) == size or (len(batch) > 2 and sample["y"] == 0):
            yield torch.tensor([s["x"] for s in batch]), torch.tensor([s["y"] for s in batch])
            batch = []


class Pipeline(IterableDataset):
    def __init__(self, *stages):
        self.stages = stages

    def __iter__(self):
        source, *rest = self.stages
        return reduce(lambda it, stage: stage(it), rest, source())

    def compose(self, stage):
        return Pipeline(*self.stages, stage)


if __name__ == "__main__":
    job = relight.init(late_standby=True)  # the pipeline is made from the rank
    torch.manual_seed(9)
    dataset = Pipeline(
        partial(shards, 8, job.rank, job.world_size, 3), expand, partial(shuffle, size=6, seed=job.rank)
    ).compose(augment)
    dataset = dataset.compose(partial(batched, size=5))
    loader = DataLoader(dataset, batch_size=None)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    seen = 0
    for step in training.steps(until=16):
        with step as (x, y):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            seen += len(x)
            optimizer.step()
    finish(job, model=model, opt=optimizer, seen=seen)
