"""A learning-rate-free optimizer: numbers in its groups change in every step, from sums over all parameters."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Prodigy(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0, d0=1e-3, betas=(0.9, 0.999)):
        defaults = {"lr": lr, "d": d0, "d0": d0, "d_max": d0, "d_numerator": 0.0, "k": 0, "betas": betas}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        beta3 = math.sqrt(beta2)
        d, k, lr = group["d"], group["k"], group["lr"]
        d_numerator = group["d_numerator"] * beta3
        d_denom, delta = 0.0, 0.0
        dlr = d * lr
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "s" not in state:
                    state["s"], state["p0"] = torch.zeros_like(p), p.clone()
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                delta += (d / group["d0"]) * dlr * torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()).item()
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=d * (1 - beta1))
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=d * d * (1 - beta2))
                state["s"].mul_(beta3).add_(p.grad, alpha=(d / group["d0"]) * dlr)
                d_denom += state["s"].abs().sum().item()
        sums = torch.tensor([d_numerator + delta, d_denom])
        dist.all_reduce(sums)
        d_numerator = sums[0].item() / dist.get_world_size()
        if sums[1] > 0:
            d_hat = sums[0].item() / sums[1].item()
            d = max(d, min(d_hat, 2 * d))
        for group in self.param_groups:
            group["d_numerator"], group["d"], group["d_max"], group["k"] = d_numerator, d, max(d, group["d_max"]), k + 1
            for p in group["params"]:
                state = self.state[p]
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(d * 1e-8), value=-dlr)


job = relight.init()
torch.manual_seed(12)
model = DDP(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1)))
optimizer = Prodigy(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
training = relight.Training(model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: torch.randn(8, 5))
for step in training.steps(until=18):
    with step as x:
        optimizer.zero_grad()
        (model(x) - x.prod(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        scheduler.step()
finish(job, model=model, optimizer=optimizer, d=optimizer.param_groups[0]["d"])
