"""A step is taken with next() inside the script's own loop over its data."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(5)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    data = torch.randn(24, 5, generator=torch.Generator().manual_seed(job.rank))
    training = relight.Training(model=model, optimizer=optimizer)
    steps = training.steps(until=12)
    for epoch in range(3):
        for x in data.split(6):
            with next(steps):
                optimizer.zero_grad()
                (model(x) - x[:, :3]).square().mean().backward()
                optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
