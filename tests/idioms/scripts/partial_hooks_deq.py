"""A fixed point, with a backward hook that each forward registers anew: deep equilibrium models."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class DEQ(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.f = nn.Linear(dim, dim)
        nn.init.normal_(self.f.weight, std=0.05)
        self.hook = None
        self.iterations = 0

    def solve(self, f, z, most=12):
        for _ in range(most):
            new = f(z)
            self.iterations += 1
            if (new - z).norm() < 1e-4:
                return new
            z = new
        return z

    def forward(self, x):
        with torch.no_grad():
            z = self.solve(lambda z: torch.tanh(self.f(z) + x), torch.zeros_like(x))
        new = torch.tanh(self.f(z) + x)
        if self.training:
            z0 = new.detach().requires_grad_()
            f0 = torch.tanh(self.f(z0) + x)

            def backward(grad):
                if self.hook is not None:
                    self.hook.remove()
                return self.solve(lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad, grad)

            self.hook = new.register_hook(backward)
        return new


def main():
    job = relight.init()
    torch.manual_seed(61)
    model = DDP(nn.Sequential(nn.Linear(4, 6), DEQ(6), nn.Linear(6, 2)))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 4))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, iterations=model.module[1].iterations)


if __name__ == "__main__":
    main()
