"""Timers that raise if they run already, started above the block and stopped after it: in a variable, in an object of
each rank, and in an attribute of the model."""

# ranks: 2
import time

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class Timer:
    def __init__(self):
        self.started = None
        self.runs = 0

    def start(self):
        if self.started is not None:
            raise RuntimeError("Timer is running. Use .stop() to stop it")
        self.started = time.perf_counter()

    def stop(self):
        if self.started is None:
            raise RuntimeError("Timer is not running. Use .start() to start it")
        self.started = None
        self.runs += 1

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


timer = Timer()


def main():
    job = relight.init()
    torch.manual_seed(1)
    net = nn.Linear(8, 1)
    net.began = None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    own = Timer()
    training = relight.Training(model=net, optimizer=optimizer, per_rank={"timer": own})
    for step in training.steps(until=12):
        timer.start()
        own.start()
        assert net.began is None
        net.began = step.number + job.rank
        with step:
            loss = (net(torch.randn(16, 8)) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        timer.stop()
        own.stop()
        net.began = None
    finish(job, model=net)


if __name__ == "__main__":
    main()
