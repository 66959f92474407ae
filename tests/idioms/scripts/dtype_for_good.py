"""A default dtype that an early step sets for good: what later steps draw and make has it."""

# ranks: 2
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
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4).float())
    for step in training.steps(until=14):
        with step as x:
            if step.number == 1:
                torch.set_default_dtype(torch.float64)
            noise = torch.randn(6, 4).float()
            loss = model(x + noise).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
