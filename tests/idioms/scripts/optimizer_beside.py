"""An optimizer of the script's own for a temperature that is in no module: it is not handed over."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(31)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    temperature = torch.ones(1, requires_grad=True)
    tuner = torch.optim.Adam([temperature], 0.05)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            tuner.zero_grad()
            (model(x) / temperature - x[:, :4].sin()).square().mean().backward()
            dist.all_reduce(temperature.grad)
            tuner.step()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, temperature=temperature)


if __name__ == "__main__":
    main()
