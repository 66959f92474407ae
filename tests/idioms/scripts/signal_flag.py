"""A handler of a signal sets a flag that the steps look at; an alarm of the script's own."""

# ranks: 2
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Stopper:
    def __init__(self):
        self.wanted = False
        self.count = 0
        signal.signal(signal.SIGUSR2, self)

    def __call__(self, number, frame):
        self.wanted = True
        self.count += 1


def main():
    job = relight.init()
    torch.manual_seed(103)
    stopper = Stopper()
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    saved = 0
    for step in training.steps(until=14):
        with step as x:
            if step.number == 6:
                os.kill(os.getpid(), signal.SIGUSR2)
            flag = torch.tensor(float(stopper.wanted))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            if flag.item():
                saved += 1
                stopper.wanted = False
            optimizer.zero_grad()
            (model(x) * (1 + saved) - x[:, :3]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, saved=saved, count=stopper.count)


if __name__ == "__main__":
    main()
