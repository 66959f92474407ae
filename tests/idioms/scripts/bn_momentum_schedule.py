"""A BNM scheduler of PointNet's kind sets the momentum of norms, and dropout follows a ramp."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class MomentumSchedule:
    def __init__(self, model, rule, last=-1):
        self.model, self.rule, self.last = model, rule, last
        self.step(last + 1)

    def step(self, epoch=None):
        epoch = self.last + 1 if epoch is None else epoch
        self.last = epoch
        self.model.apply(self.set_on)

    def set_on(self, module):
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = self.rule(self.last)


def main():
    job = relight.init()
    torch.manual_seed(23)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 4))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = MomentumSchedule(net, lambda n: max(0.5 * 0.8 ** (n // 2), 0.01))
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=14):
        with step as x:
            net[3].p = min(0.5, net[3].p + 0.02)
            optimizer.zero_grad()
            (model(x) - x[:, :4].sin()).square().mean().backward()
            optimizer.step()
            schedule.step()
    finish(job, model=model, optimizer=optimizer, momentum=net[1].momentum, p=net[3].p, last=schedule.last)


if __name__ == "__main__":
    main()
