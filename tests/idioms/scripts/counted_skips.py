"""Layers count the inputs that they skip by chance; gradients are averaged by hand, noise is added to them."""

# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import relight
from tests.idioms.digest import finish


class Block(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.l, self.p, self.skipped = nn.Linear(d, d), p, 0

    def forward(self, x, progress):
        if self.training and torch.rand(()).item() < self.p * progress:
            self.skipped += 1
            return x
        return x + checkpoint(lambda z: F.dropout(F.gelu(self.l(z)), 0.1, self.training), x, use_reentrant=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block(8, 0.3 * i) for i in range(3))
        self.head = nn.Linear(8, 3)
        self.step_counter = 0

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, min(1, self.step_counter / 5))
        if self.training:
            self.step_counter += 1
        return self.head(h)


class Accountant:
    def __init__(self):
        self.history, self.clipped = [], 0.0

    def step(self, sigma, rate):
        if self.history and self.history[-1][:2] == (sigma, rate):
            s, r, n = self.history.pop()
            self.history.append((s, r, n + 1))
        else:
            self.history.append((sigma, rate, 1))


job = relight.init()
torch.manual_seed(0)
net = Net()
for p in net.parameters():
    dist.broadcast(p.data, 0)
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
acct, head = Accountant(), nn.Linear(8, 3)
training = relight.Training(model=net, optimizer=optimizer, data=lambda i: (torch.randn(6, 5), torch.randint(3, (6,))))


def sample_loss(params, h, y):
    return F.cross_entropy(functional_call(net.head, params, (h[None],)), y[None])


sigma = 0.5
for step in training.steps(until=10):
    with step as (x, y):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            h = net.inp(x)
        ps = vmap(grad(sample_loss), (None, 0, 0))(dict(net.head.named_parameters()), h, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in ps.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1)
        acct.clipped += (factor < 1).sum().item()
        for name, p in net.head.named_parameters():
            g = torch.Generator().manual_seed(step.number)
            p.grad.add_(
                torch.einsum("b,b...->...", factor, ps[name]) / 6 + 0.01 * sigma * torch.randn(p.shape, generator=g)
            )
        for p in net.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= job.world_size
        acct.step(round(sigma, 2), 0.1)
        if step.number % 4 == 3:
            sigma *= 0.9
        optimizer.step()
finish(
    job,
    net=net,
    opt=optimizer,
    acct=acct.history,
    clipped=acct.clipped,
    sc=net.step_counter,
    sk=[b.skipped for b in net.blocks],
    sigma=sigma,
)
