"""A schedule is a function made anew in a step, which remembers numbers of that step."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def make(base, at):
    def schedule(number):
        return base / (1 + 0.1 * (number - at))

    return schedule


def main():
    job = relight.init()
    torch.manual_seed(37)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = make(0.2, 0)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if step.number % 5 == 4:
                schedule = make(0.1 + mean.item() * 0.01, step.number)
            for group in optimizer.param_groups:
                group["lr"] = schedule(step.number)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
