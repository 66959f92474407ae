"""Steps and batches go side by side in one zip."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(9)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    data = torch.randn(72, 5, generator=torch.Generator().manual_seed(job.rank))
    training = relight.Training(model=model, optimizer=optimizer)
    for step, x in zip(training.steps(until=12), data.split(6), strict=False):
        with step:
            optimizer.zero_grad()
            (model(x) - x[:, :3]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
