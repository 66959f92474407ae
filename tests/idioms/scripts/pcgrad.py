"""PCGrad: gradients of two tasks projected on each other, an optimizer wrapped in a class, gradients averaged by hand."""

import random

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class PCGrad:
    def __init__(self, optimizer):
        self._optim = optimizer

    @property
    def optimizer(self):
        return self._optim

    def zero_grad(self):
        return self._optim.zero_grad(set_to_none=True)

    def step(self):
        return self._optim.step()

    def pc_backward(self, objectives):
        grads = []
        params = [p for g in self._optim.param_groups for p in g["params"]]
        for objective in objectives:
            self._optim.zero_grad(set_to_none=True)
            objective.backward(retain_graph=True)
            grads.append(torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in params]))
        projected = [g.clone() for g in grads]
        for g_i in projected:
            random.shuffle(grads)
            for g_j in grads:
                dot = torch.dot(g_i, g_j)
                if dot < 0:
                    g_i -= dot * g_j / (g_j.norm() ** 2)
        merged = torch.stack(projected).mean(0)
        dist.all_reduce(merged)
        merged /= dist.get_world_size()
        offset = 0
        for p in params:
            p.grad = merged[offset : offset + p.numel()].view_as(p).clone()
            offset += p.numel()


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 16)
        self.heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])

    def forward(self, x):
        h = torch.relu(self.shared(x))
        return [head(h) for head in self.heads]


job = relight.init()
torch.manual_seed(18)
net = MultiHead()
optimizer = PCGrad(torch.optim.Adam(net.parameters(), lr=3e-3))
training = relight.Training(model=net, optimizer=optimizer.optimizer, data=lambda n: torch.randn(8, 6))
for step in training.steps(until=16):
    with step as x:
        first, second = net(x)
        losses = [(first - x[:, :1]).pow(2).mean(), (second + x[:, :1]).abs().mean()]
        optimizer.zero_grad()
        optimizer.pc_backward(losses)
        optimizer.step()
finish(job, net=net, optimizer=optimizer.optimizer)
