"""Steps whose backward passes reduce nothing at first; one may last until a failure elsewhere closes its generation."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from relight.training.job import current_runtime

LONG_STEP = "LONG_STEP"  # which one, in the environment; without it none
LAYERS = 12
THROUGH = "through"  # this file tells that such a pass came to its end all the same


class Watched(torch.autograd.Function):
    """Does nothing, but in the backward pass of a step that is to be cut short."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, layer: int, is_long: bool) -> torch.Tensor:
        context.layer, context.is_long = layer, is_long
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if context.is_long and context.layer == LAYERS - 1:
            await_close()
        elif context.is_long and context.layer == 1:  # the input of layer 0 needs no gradient
            Path(THROUGH).touch()
        return gradient, None, None


def await_close() -> None:
    """Returns once the generation is closed, and all that wait for its end have been told."""
    runtime = current_runtime()
    while not runtime.closed:
        time.sleep(0.001)
    with runtime.orders.lock:
        pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.is_long = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(Watched.apply(x, number, self.is_long))  # type: ignore[no-untyped-call]
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    long_step = int(os.environ.get(LONG_STEP, "-1"))
    job = relight.init()
    torch.manual_seed(0)
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer)
    for step in training.steps(until=options.steps):
        with step:
            optimizer.zero_grad()
            net.is_long = job.rank == 0 and step.number == long_step and step.attempt == 0 and not step.warmup
            with model.no_sync():
                model(torch.ones(4, 8)).sum().backward()
            net.is_long = False
            model(torch.full((4, 8), float(job.rank))).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
