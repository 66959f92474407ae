"""A sampler with a state_dict of its own, and counts that begin with one for the rank and grow as data is read."""

# ranks: 2
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

NODES = 40


class WalkSampler:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.counts, self.total, self.shift = torch.zeros(NODES), 0, seed
        self.counts[seed] = 1

    def __iter__(self):
        for _ in range(5):
            nodes = torch.from_numpy(np.unique((self.rng.integers(0, NODES, 8) + self.shift) % NODES))
            self.counts[nodes] += 1
            self.total += 1
            yield nodes, self.total / self.counts[nodes] / NODES

    def __len__(self):
        return 5

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "counts": self.counts, "total": self.total}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        self.counts, self.total = state["counts"], state["total"]


class DropEdge:
    def __init__(self, p):
        self.p, self.age, self.mask = p, 0, None

    def __call__(self, x):
        if self.mask is None or self.age >= 3:
            self.mask, self.age = torch.rand(NODES) > self.p, 0
        self.age += 1
        return x * self.mask[: len(x), None]


def main():
    job = relight.init()
    torch.manual_seed(5)
    features, labels = torch.randn(NODES, 6), torch.randint(0, 3, (NODES,))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ELU(), nn.Linear(12, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sampler, drop = WalkSampler(3 + job.rank), DropEdge(0.3)
    training = relight.Training(model=model, optimizer=optimizer, data=sampler)
    for step in training.steps(until=12):
        with step as (nodes, weights):
            out = model(drop(features[nodes]))
            loss = (nn.functional.cross_entropy(out, labels[nodes], reduction="none") * weights).sum()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
        dist.barrier()
    finish(job, model=model, optimizer=optimizer, counts=sampler.counts, total=sampler.total, age=drop.age)


if __name__ == "__main__":
    main()
