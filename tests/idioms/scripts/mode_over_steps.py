"""A function mode that is entered in one step and left in a later one, as profilers of several steps are."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

import relight
from tests.idioms.digest import finish


class Halved(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is nn.functional.linear else result


def main():
    job = relight.init()
    torch.manual_seed(307)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mode = Halved()
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            if step.number == 3:
                mode.__enter__()
            loss = (model(x) - x[:, :3]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step.number == 8:
                mode.__exit__(None, None, None)
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
