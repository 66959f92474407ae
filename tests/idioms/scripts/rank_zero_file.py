"""Rank 0 writes its metrics to a file and everybody reads the mean of the last lines back, as some schedulers do."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

PATH = "metrics.jsonl"


def main():
    job = relight.init()
    torch.manual_seed(107)
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            loss.backward()
            value = loss.detach().clone()
            dist.all_reduce(value)
            losses.append(value.item())
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + sum(losses[-3:]) / 3)
            optimizer.step()
        if job.rank == 0 and step.committed:
            with open(PATH, "a") as file:
                file.write(json.dumps({"step": step.number, "loss": losses[-1]}) + os.linesep)
    finish(job, model=model, optimizer=optimizer, losses=losses)


if __name__ == "__main__":
    main()
