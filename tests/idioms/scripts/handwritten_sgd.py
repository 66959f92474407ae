"""No torch.optim at all: a class with velocities in a list, `w -= lr * g` under no_grad, gradients reduced by hand.

The class has state_dict and load_state_dict but is no torch.optim.Optimizer.
"""

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


class MySGD:
    def __init__(self, params, lr=0.05, momentum=0.9):
        self.params = list(params)
        self.lr, self.momentum = lr, momentum
        self.velocities = [torch.zeros_like(p) for p in self.params]
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        for p, v in zip(self.params, self.velocities):
            v *= self.momentum
            v += p.grad
            p -= self.lr * v

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def state_dict(self):
        return {"velocities": self.velocities, "t": self.t, "lr": self.lr}

    def load_state_dict(self, state):
        for mine, other in zip(self.velocities, state["velocities"]):
            mine.copy_(other)
        self.t, self.lr = state["t"], state["lr"]


def main():
    job = relight.init()
    torch.manual_seed(44)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    opt = MySGD(net.parameters())
    for step in relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(8, 5)).steps(until=16):
        with step as x:
            loss = (net(x) - x.median(1, keepdim=True).values).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= job.world_size
            opt.step()
    finish(job, net=net, opt=opt)


if __name__ == "__main__":
    main()
