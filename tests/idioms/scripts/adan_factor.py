"""Optimizers in one file, from papers: Adan with differences of gradients and a restart by steps, Adafactor with factored
moments and a rate relative to the size of parameters, Lion; each trains a part of one model."""

# ranks: 2
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import relight
from tests.idioms.digest import finish


class Adan(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.02, no_prox=False):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, no_prox=no_prox))

    @torch.no_grad()
    def restart_opt(self):
        for group in self.param_groups:
            group["step"] = 0
            for p in group["params"]:
                state = self.state[p]
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg_diff"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2, beta3 = group["betas"]
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            corrections = [1.0 - beta ** group["step"] for beta in group["betas"]]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    for key in ("exp_avg", "exp_avg_sq", "exp_avg_diff"):
                        state[key] = torch.zeros_like(p)
                if "neg_pre_grad" not in state or group["step"] == 1:
                    state["neg_pre_grad"] = p.grad.clone().mul_(-1.0)
                diff = state["neg_pre_grad"]
                diff.add_(p.grad)
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_diff"].mul_(beta2).add_(diff, alpha=1 - beta2)
                diff.mul_(beta2).add_(p.grad)
                state["exp_avg_sq"].mul_(beta3).addcmul_(diff, diff, value=1 - beta3)
                denom = (state["exp_avg_sq"].sqrt() / math.sqrt(corrections[2])).add_(group["eps"])
                p.addcdiv_(state["exp_avg"], denom, value=-group["lr"] / corrections[0])
                p.addcdiv_(state["exp_avg_diff"], denom, value=-group["lr"] * beta2 / corrections[1])
                p.div_(1 + group["lr"] * group["weight_decay"])
                state["neg_pre_grad"].zero_().add_(p.grad, alpha=-1.0)


class Adafactor(Optimizer):
    def __init__(self, params, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8, warmup_init=True):
        defaults = dict(lr=None, eps=eps, clip_threshold=clip_threshold, decay_rate=decay_rate, warmup_init=warmup_init)
        super().__init__(params, defaults)

    @staticmethod
    def _rms(tensor):
        return tensor.norm(2) / (tensor.numel() ** 0.5)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad, self.state[p]
                if len(state) == 0:
                    state["step"], state["RMS"] = 0, 0
                    if grad.dim() >= 2:
                        state["exp_avg_sq_row"] = torch.zeros(grad.shape[:-1])
                        state["exp_avg_sq_col"] = torch.zeros(grad.shape[:-2] + grad.shape[-1:])
                    else:
                        state["exp_avg_sq"] = torch.zeros_like(grad)
                state["step"] += 1
                state["RMS"] = self._rms(p)
                min_step = 1e-4 * state["step"] if group["warmup_init"] else 1e-2
                rel = min(min_step, 1.0 / math.sqrt(state["step"]))
                lr = max(group["eps"][1], state["RMS"]) * rel
                beta2t = 1.0 - math.pow(state["step"], group["decay_rate"])
                update = grad**2 + group["eps"][0]
                if grad.dim() >= 2:
                    row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
                    row.mul_(beta2t).add_(update.mean(-1), alpha=1.0 - beta2t)
                    col.mul_(beta2t).add_(update.mean(-2), alpha=1.0 - beta2t)
                    update = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * col.rsqrt().unsqueeze(-2) * grad
                else:
                    state["exp_avg_sq"].mul_(beta2t).add_(update, alpha=1.0 - beta2t)
                    update = state["exp_avg_sq"].rsqrt() * grad
                update.div_((self._rms(update) / group["clip_threshold"]).clamp_(min=1.0))
                p.add_(-lr * update)


def lion_update(p, grad, exp_avg, lr, wd, beta1, beta2):
    p.data.mul_(1 - lr * wd)
    update = exp_avg.clone().mul_(beta1).add(grad, alpha=1 - beta1).sign_()
    p.add_(update, alpha=-lr)
    exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


class Lion(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        self.update_fn = lion_update

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                self.update_fn(p, p.grad, state["exp_avg"], group["lr"], group["weight_decay"], *group["betas"])


job = relight.init()
torch.manual_seed(4)
net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 2))
model = DDP(net)
optimizers = [Adan(net[0].parameters()), Adafactor(net[2].parameters()), Lion(net[4].parameters())]
schedulers = [torch.optim.lr_scheduler.PolynomialLR(optimizers[k], 22, power=0.5) for k in (0, 2)]
training = relight.Training(
    model=model, optimizer=optimizers, scheduler=schedulers, data=lambda n: (torch.randn(8, 6), torch.randn(8, 2))
)
for step in training.steps(until=22):
    with step as (x, y):
        loss = nn.functional.huber_loss(model(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        if (step.number + 1) % 8 == 0:
            optimizers[0].restart_opt()
finish(job, model=net, adan=optimizers[0], adafactor=optimizers[1], lion=optimizers[2])
