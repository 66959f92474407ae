"""An asynchronous all_reduce of the loss that is launched before optimizer.step() and waited for after it; the learning rate
of the next step follows from its result."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(42)
    model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=18):
        with step as x:
            loss = (model(x) - x.std(1, keepdim=True)).pow(2).mean()
            reduced = loss.detach().clone()
            handle = dist.all_reduce(reduced, async_op=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            handle.wait()
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + reduced.item() / job.world_size)
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
