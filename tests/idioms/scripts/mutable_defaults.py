"""State in a function's default argument, in an attribute of a function, and in a class."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def smooth(value, history=[], window=4):  # noqa: B006
    history.append(value)
    if len(history) > window:
        history.pop(0)
    return sum(history) / len(history)


def warm(step, base=0.1):
    warm.calls = getattr(warm, "calls", 0) + 1
    return base * min(1.0, warm.calls / 6)


class Clock:
    ticks = 0
    _instance = None

    def __new__(cls):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.phase = 0.0
        return cls._instance

    def tick(self, by):
        type(self).ticks += 1
        self.phase += by


def main():
    job = relight.init()
    torch.manual_seed(29)
    model = DDP(nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            loss = (model(x) - x.cos()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            level = smooth(mean.item() / dist.get_world_size())
            Clock().tick(level)
            for g in optimizer.param_groups:
                g["lr"] = warm(step.number) / (1 + level + 0.01 * Clock.ticks)
            optimizer.step()
    finish(job, model=model, calls=warm.calls, ticks=Clock.ticks, phase=Clock().phase)


if __name__ == "__main__":
    main()
