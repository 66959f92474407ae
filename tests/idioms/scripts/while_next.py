"""A loop without a head: next() of the steps until they end."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(7)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    steps = iter(training.steps(until=13))
    total, mean = 0.0, 0.0
    while True:
        step = next(steps, None)
        if step is None:
            break
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3] * (1 + mean)).square().mean()
            loss.backward()
            mean = 0.9 * mean + 0.1 * loss.item()
            optimizer.step()
        total += 1
    finish(job, model=model, optimizer=optimizer, mean=mean)


if __name__ == "__main__":
    main()
