"""Loops in one line: over the steps, whose turns call two functions, and in a generator that passes steps on."""

# ranks: 2
# fmt: off
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Bar:
    def __init__(self, it):
        self.it, self.n = it, 0

    def __iter__(self):
        for item in self.it: yield item; self.n += 1  # noqa: E701, E702


job = relight.init()
torch.manual_seed(4)
net = DDP(nn.Linear(5, 3))
opt = torch.optim.Adam(net.parameters(), 0.05)
mean, seen, rate = None, 0, 1.0


def look(step):
    global rate
    rate = 0.97 ** (seen + 1)


def train(step):
    global mean, seen
    with step as x:
        loss = (net(x) - x[:, :3].tanh()).square().mean() * rate
        opt.zero_grad()
        loss.backward()
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
        seen += 1
        opt.param_groups[0]["lr"] = 0.05 * rate
        opt.step()


training = relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(6, 5))
for step in Bar(training.steps(until=14)): look(step); train(step)  # noqa: E701, E702
finish(job, net=net, opt=opt, mean=mean, seen=seen, rate=rate)
