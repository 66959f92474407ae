"""Adversarial weights: a proxy of the model is trained one step, and its difference is added and taken away."""

# ranks: 2
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def diff_in_weights(model, proxy):
    diff = OrderedDict()
    for (k, old), new in zip(model.state_dict().items(), proxy.state_dict().values(), strict=True):
        if old.dim() > 1 and "weight" in k:
            d = new - old
            diff[k] = old.norm() / (d.norm() + 1e-20) * d
    return diff


def add_into_weights(model, diff, coeff):
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name in diff:
                param.add_(coeff * diff[name])


class AdvWeightPerturb:
    def __init__(self, model, proxy, proxy_optim, gamma):
        self.model, self.proxy, self.proxy_optim, self.gamma = model, proxy, proxy_optim, gamma

    def calc_awp(self, x, y):
        self.proxy.load_state_dict(self.model.state_dict())
        self.proxy.train()
        loss = -F.cross_entropy(self.proxy(x), y)
        self.proxy_optim.zero_grad()
        loss.backward()
        for p in self.proxy.parameters():
            dist.all_reduce(p.grad)
        self.proxy_optim.step()
        return diff_in_weights(self.model, self.proxy)

    def perturb(self, diff):
        add_into_weights(self.model, diff, self.gamma)

    def restore(self, diff):
        add_into_weights(self.model, diff, -self.gamma)


def make():
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def main():
    job = relight.init()
    torch.manual_seed(97)
    net = make()
    proxy = make()
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    proxy_opt = torch.optim.SGD(proxy.parameters(), lr=0.01)
    awp = AdvWeightPerturb(net, proxy, proxy_opt, 0.05)
    training = relight.Training(
        model={"net": model, "proxy": proxy},
        optimizer={"opt": opt},
        per_rank={"proxy_opt": proxy_opt},
        data=lambda n: torch.randn(8, 6),
    )
    for step in training.steps(until=14):
        with step as x:
            y = x[:, :3].argmax(1)
            delta = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_()
            grad = torch.autograd.grad(F.cross_entropy(net(x + delta), y), delta)[0]
            adv = (x + (delta + 0.1 * grad.sign()).clamp(-0.1, 0.1)).detach()
            diff = awp.calc_awp(adv, y)
            awp.perturb(diff)
            opt.zero_grad()
            F.cross_entropy(model(adv), y).backward()
            opt.step()
            awp.restore(diff)
    finish(job, net=net, opt=opt)


if __name__ == "__main__":
    main()
