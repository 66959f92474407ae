"""A dispatch mode that counts the operations of forward, backward and write of one step sets the rate of the next."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import relight
from tests.idioms.digest import finish


class Work(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def main():
    job = relight.init()
    torch.manual_seed(302)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    rate = 0.1
    for step in training.steps(until=14):
        with step as x:
            for group in optimizer.param_groups:
                group["lr"] = rate
            with Work() as work:
                loss = (model(x) - x[:, :3]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            rate = 0.05 + 0.01 * (work.count % 7)
    finish(job, model=model, optimizer=optimizer, rate=rate)


if __name__ == "__main__":
    main()
