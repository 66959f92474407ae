"""Forward and gradient hooks that keep statistics: a running mean of activations that centers them, and a running norm of a
gradient that scales it. The state lives in an object that only the hooks know."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ActivationCentering:
    def __init__(self, module, momentum=0.1):
        self.momentum = momentum
        self.mean = None
        self.calls = 0
        module.register_forward_hook(self)

    def __call__(self, module, args, output):
        batch_mean = output.detach().mean(0)
        self.mean = batch_mean if self.mean is None else self.mean + self.momentum * (batch_mean - self.mean)
        self.calls += 1
        return output - self.mean


class GradScaleHook:
    def __init__(self, parameter):
        self.norm = 1.0
        parameter.register_hook(self.scale)

    def scale(self, grad):
        self.norm = 0.9 * self.norm + 0.1 * float(grad.norm())
        return grad / max(self.norm, 1e-3)


def main():
    job = relight.init()
    torch.manual_seed(28)
    net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
    centering = ActivationCentering(net[0])
    hook = GradScaleHook(net[2].weight)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 5))
    for step in training.steps(until=16):
        with step as x:
            loss = (model(x) - x.norm(dim=1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, mean=centering.mean, calls=centering.calls, norm=hook.norm)


if __name__ == "__main__":
    main()
