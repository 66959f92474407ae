"""A normalizing flow with ActNorm: parameters are initialized from the first batch, inside the first step's forward, and a
flag on the module says that it happened."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ActNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.loc, self.log_scale = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.initialized = False

    def initialize(self, x):
        with torch.no_grad():
            stats = torch.stack([x.mean(0), x.std(0)])
            dist.all_reduce(stats)
            mean, std = stats / dist.get_world_size()
            self.loc.data.copy_(-mean)
            self.log_scale.data.copy_(-torch.log(std + 1e-6))

    def forward(self, x):
        if not self.initialized:
            self.initialize(x)
            self.initialized = True
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim // 2, 12), nn.ReLU(), nn.Linear(12, dim))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        return torch.cat([(b + t) * s, a], 1), s.log().sum(1)


class Flow(nn.Module):
    def __init__(self, dim=6, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(layer for _ in range(depth) for layer in (ActNorm(dim), Coupling(dim)))

    def forward(self, x):
        logdet = torch.zeros(len(x))
        for layer in self.layers:
            x, d = layer(x)
            logdet = logdet + d
        return -(-0.5 * (x**2 + math.log(2 * math.pi)).sum(1) + logdet).mean()


job = relight.init()
torch.manual_seed(59)
flow = DDP(Flow())
optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
mix = torch.randn(6, 6)
for step in relight.Training(model=flow, optimizer=optimizer, data=lambda n: torch.randn(9, 6) @ mix + 3).steps(
    until=14
):
    with step as x:
        loss = flow(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finish(
    job, flow=flow, optimizer=optimizer, initialized=[m.initialized for m in flow.modules() if isinstance(m, ActNorm)]
)
