"""A linear model from scratch: the update is written into parameters under no_grad, and an SGD without momentum is handed
over only because an optimizer is asked for. Its step() is never called."""

import torch
import torch.distributed as dist
import torch.nn as nn

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(45)


class LinReg(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 1) * 0.1)
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x @ self.w + self.b


model = LinReg()
true_w = torch.randn(6, 1)
unused = torch.optim.SGD(model.parameters(), lr=0.1)
for step in relight.Training(model=model, optimizer=unused, data=lambda n: torch.randn(10, 6)).steps(until=16):
    with step as X:
        loss = ((model(X) - X @ true_w) ** 2).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for g in grads:
            dist.all_reduce(g)
        with torch.no_grad():
            for param, g in zip(model.parameters(), grads):
                param -= 0.05 * g / job.world_size
finish(job, model=model)
