"""Learning without forgetting: at each task's start the old model is frozen as a copy, in a list of all of them."""

# ranks: 2
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(18)
    model = DDP(nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    old_models = []
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6) + n // 5)
    for step in training.steps(until=15):
        with step as x:
            if step.number % 5 == 0 and step.number:
                old_models.append(copy.deepcopy(model.module).eval().requires_grad_(False))
            optimizer.zero_grad()
            out = model(x)
            loss = (out - x[:, :4].sin()).square().mean()
            for old in old_models:
                loss = loss + 0.1 * (out - old(x)).square().mean()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, old=[m.state_dict() for m in old_models])


if __name__ == "__main__":
    main()
