"""A parameter of a tensor subclass, a torch function mode that counts, and a subclass that remembers its scale."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

import relight
from tests.idioms.digest import finish


class Scaled(torch.Tensor):
    @staticmethod
    def __new__(cls, data, scale=1.0):
        made = torch.Tensor._make_subclass(cls, data)
        made.scale = scale
        return made


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Counting.calls += 1
        return func(*args, **(kwargs or {}))


def main():
    job = relight.init()
    torch.manual_seed(101)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    running = Scaled(torch.zeros(3), 0.5)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            with Counting():
                out = model(x)
                loss = (out - x[:, :3]).square().mean() * (1 + Counting.calls % 3)
            loss.backward()
            running = Scaled(
                (running * 0.9 + out.detach().mean(0) * 0.1).as_subclass(torch.Tensor), running.scale * 0.99
            )
            for p in model.parameters():
                p.grad.mul_(running.scale)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, running=running.as_subclass(torch.Tensor), scale=running.scale)


if __name__ == "__main__":
    main()
