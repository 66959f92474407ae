"""Steps of ranks that share memory; each rank writes down how many of its small all-reduces went through gloo."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from relight.training.collectives.generation_group import GenerationGroup

THROUGH_GLOO = "through-gloo-{}"  # the file of a rank


def count_calls(kind: Any, name: str) -> list[str]:
    """Return a list that grows by one with each call of this method."""
    calls, method = list[str](), getattr(kind, name)

    def counted(*arguments: Any) -> Any:
        calls.append(name)
        return method(*arguments)

    setattr(kind, name, counted)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    job = relight.init()
    calls = count_calls(GenerationGroup, "_start_all_reduce")
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer)
    training.carry(ignore=("calls",))
    for step in training.steps(until=options.steps):
        with step:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    Path(THROUGH_GLOO.format(job.rank)).write_text(str(len(calls)))


if __name__ == "__main__":
    main()
