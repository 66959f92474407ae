"""The block of a step on an ExitStack, beside other contexts, in a loop that counts in a dictionary."""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(44)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(8, 6), torch.randint(2, (8,)))
    )
    seen = {"samples": 0, "loss": 0.0}
    for step in training.steps(until=12):
        with contextlib.ExitStack() as stack:
            x, y = stack.enter_context(step)
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            loss = nn.functional.cross_entropy(model(x), y) * (1 + 0.01 * seen["samples"])
            optimizer.zero_grad()
            loss.backward()
            seen["samples"] += len(x)
            seen["loss"] += loss.item()
            optimizer.step()
        shown = loss.item() / seen["samples"]
    finish(job, model=model, optimizer=optimizer, seen=seen, shown=shown)


main()
