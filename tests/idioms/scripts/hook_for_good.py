"""A forward hook that an early step registers for good: neither a replacement nor a later start has it."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(31)
    inner = nn.Linear(4, 2)
    model = DDP(inner)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=14):
        with step as x:
            if step.number == 1:
                inner.register_forward_hook(lambda module, inputs, output: output * 1.5)
            loss = (model(x) - x[:, :2]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
