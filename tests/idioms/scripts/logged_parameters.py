"""Parameters of a tensor subclass that counts the functions it is given to."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Logged(torch.Tensor):
    log = {}

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        cls.log[name] = cls.log.get(name, 0) + 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width).as_subclass(Logged))

    def forward(self, x):
        return x * self.weight


def main():
    job = relight.init()
    torch.manual_seed(304)
    model = DDP(nn.Sequential(nn.Linear(6, 12), Scale(12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
            for p in model.parameters():
                p.grad.mul_(1 + 0.1 * (Logged.log.get("mul", 0) % 3))
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, multiplied=Logged.log["mul"])


if __name__ == "__main__":
    main()
