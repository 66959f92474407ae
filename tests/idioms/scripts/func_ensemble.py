"""A torch.func ensemble: stacked parameters in a dict, vmap over functional_call, gradients by torch.func.grad, an update
by hand. There is no module and no torch.optim: parameters are wrapped in a module just to hand them over."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import relight
from tests.idioms.digest import finish


class Holder(nn.Module):
    def __init__(self, params):
        super().__init__()
        self.names = sorted(params)
        self.values = nn.ParameterList([params[name].detach() for name in self.names])

    def as_dict(self):
        return {name: p.data for name, p in zip(self.names, self.values)}


class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                p.sub_(buf, alpha=group["lr"])


def main():
    job = relight.init()
    torch.manual_seed(30)
    members = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(4)]
    params, buffers = stack_module_state(members)
    base = copy.deepcopy(members[0]).to("meta")

    def loss_fn(p, b, x, y):
        return (functional_call(base, (p, b), (x,)) - y).pow(2).mean()

    per_model_grad = vmap(grad(loss_fn), in_dims=(0, 0, None, None))
    holder = Holder(params)
    optimizer = Momentum(holder.parameters(), lr=0.02)
    training = relight.Training(model=holder, optimizer=optimizer)
    for step in training.steps(until=14):
        with step:
            x = torch.randn(10, 3)
            grads = per_model_grad(holder.as_dict(), buffers, x, x.prod(1, keepdim=True))
            for name, p in zip(holder.names, holder.values):
                g = grads[name].contiguous()
                dist.all_reduce(g)
                p.grad = g / job.world_size
            optimizer.step()
    finish(job, holder=holder, optimizer=optimizer)


if __name__ == "__main__":
    main()
