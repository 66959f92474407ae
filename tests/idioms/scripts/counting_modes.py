"""A torch function mode around the whole loop, and a dispatch mode around one step's work: both counts are used."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import relight
from tests.idioms.digest import finish


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        Operations.seen[name] = Operations.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def main():
    job = relight.init()
    torch.manual_seed(301)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3)))
    average = nn.Linear(12, 3).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    training = relight.Training(model=model, ema=average, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    functions = Functions()
    with functions:
        for step in training.steps(until=14):
            with step as x:
                optimizer.zero_grad()
                with Operations():
                    for p in average.parameters():
                        p.data.mul_(0.9)
                    loss = (model(x) - x[:, :3]).square().mean()
                    loss = loss * (1 + functions.calls % 3)
                for p, q in zip(average.parameters(), model.module[3].parameters(), strict=True):
                    p.data.add_(q.data, alpha=0.1 + sum(Operations.seen.values()) % 2)
                loss.backward()
                with Operations():
                    optimizer.step()
                model.module[1].momentum = 0.1 + 0.1 * (sum(Operations.seen.values()) % 3)
    finish(job, model=model, optimizer=optimizer, average=average, calls=functions.calls, seen=Operations.seen)


if __name__ == "__main__":
    main()
