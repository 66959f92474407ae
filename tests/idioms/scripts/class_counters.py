"""State in classes: a counter of the class, a registry of classes, and settings of torch that a step changes."""

# ranks: 2
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Schedule(NamedTuple):
    step: int = 0
    lr: float = 0.1
    bad: int = 0


class Task:
    registry = {}
    seen = 0

    def __init_subclass__(cls):
        Task.registry[cls.__name__] = cls
        cls.wins = 0

    @classmethod
    def sample(cls, x):
        Task.seen += 1
        chosen = list(cls.registry.values())[(Task.seen + cls.registry["Sine"].wins) % len(cls.registry)]
        return chosen, chosen.target(x)


class Sine(Task):
    @staticmethod
    def target(x):
        return x.sin().mean(1, keepdim=True)


class Product(Task):
    @staticmethod
    def target(x):
        return x.prod(1, keepdim=True)


class Net(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, x):
        type(self).calls += 1
        return self.body(x) / (1 + 0.01 * type(self).calls)


def main():
    job = relight.init()
    torch.manual_seed(67)
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 3, dtype=torch.float32))
    schedule, last = Schedule(), None
    for step in training.steps(until=15):
        with step as x:
            task, target = Task.sample(x)
            optimizer.zero_grad()
            loss = (model(x) - target).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if last is not None and mean.item() > last:
                schedule = schedule._replace(bad=schedule.bad + 1, lr=schedule.lr * 0.9)
            else:
                task.wins += 1
            schedule = schedule._replace(step=schedule.step + 1)
            last = mean.item()
            if step.number == 5:
                torch.set_default_dtype(torch.float64)
            if step.number == 8:
                torch.set_default_dtype(torch.float32)
            noise = torch.zeros(1).add(1 / 3).float()
            optimizer.param_groups[0]["lr"] = schedule.lr * float(noise)
            optimizer.step()
    finish(job, model=model, schedule=tuple(schedule), wins=[t.wins for t in Task.registry.values()], calls=Net.calls)


if __name__ == "__main__":
    main()
