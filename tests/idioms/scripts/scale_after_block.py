"""A scale that code after the block computes now and then, for the steps that follow."""

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
    scale, history = 1.0, []
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=14):
        with step as x:
            loss = (model(x) - x[:, :2]).square().mean() * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.committed and step.number % 2 == 0:
            scale *= 0.9
            history.append(scale)
    finish(job, model=model, optimizer=optimizer, scale=scale, history=history)


if __name__ == "__main__":
    main()
