"""Steps change their batches: items and attributes are set anew and popped; from some step on, inputs are scaled."""

# ranks: 2
import collections

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import relight
from tests.idioms.digest import finish


class Encoding(collections.UserDict):
    """A batch as tokenizers return it."""


class Graph:
    """A batch with attributes, as those of graphs."""

    def __init__(self, x):
        self.x = x


def collate(rows):
    x = torch.stack(rows)
    return {"x": x, "y": x.sum(1), "encoding": Encoding(x=x.clone(), mask=x > 0), "graph": Graph(x.clone())}


def main():
    job = relight.init()
    torch.manual_seed(9)
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    data = list(torch.randn(72, 5, generator=torch.Generator().manual_seed(3)))
    loader = DataLoader(data, 6, sampler=DistributedSampler(data), collate_fn=collate)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    for step in training.steps(until=12):
        with step as batch:
            encoding, graph = batch["encoding"], batch["graph"]
            if step.number >= 3:
                batch["x"] = batch["x"] * 2
                encoding["x"] = encoding["x"] * 2
                graph.x = graph.x * 2
            y = batch["y"]
            graph.x[encoding.pop("mask")] += 0.1
            optimizer.zero_grad()
            for x in (batch["x"], encoding["x"], graph.x):
                (model(x)[:, 0] - y).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
