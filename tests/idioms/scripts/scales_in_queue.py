"""Scales that wait in a queue.Queue from step to step: told, as it can be neither undone nor written down."""

# ranks: 2
import queue

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(31)
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    waiting = queue.Queue()
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=14):
        with step as x:
            scale = waiting.get() if waiting.qsize() > 3 else 1.0
            loss = (model(x) - x[:, :2]).square().mean() * scale
            optimizer.zero_grad()
            loss.backward()
            waiting.put(1.0 / (1 + step.number))
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
