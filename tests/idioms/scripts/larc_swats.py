"""LARC around an optimizer (it sets weight decay aside and puts it back) and a switch from Adam to SGD in mid-training."""

# ranks: 2
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import relight
from tests.idioms.digest import finish


class LARC:
    def __init__(self, optimizer, trust_coefficient=0.02, eps=1e-8):
        self.optim, self.trust_coefficient, self.eps = optimizer, trust_coefficient, eps

    def __getstate__(self):
        return self.optim.__getstate__()

    @property
    def state(self):
        return self.optim.state

    @property
    def param_groups(self):
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value):
        self.optim.param_groups = value

    def state_dict(self):
        return self.optim.state_dict()

    def load_state_dict(self, state_dict):
        self.optim.load_state_dict(state_dict)

    def zero_grad(self):
        self.optim.zero_grad()

    def step(self):
        with torch.no_grad():
            weight_decays = []
            for group in self.optim.param_groups:
                weight_decay = group.get("weight_decay", 0)
                weight_decays.append(weight_decay)
                group["weight_decay"] = 0
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    param_norm, grad_norm = torch.norm(p.data), torch.norm(p.grad.data)
                    if param_norm != 0 and grad_norm != 0:
                        adaptive = (
                            self.trust_coefficient * param_norm / (grad_norm + param_norm * weight_decay + self.eps)
                        )
                        p.grad.data += weight_decay * p.data
                        p.grad.data *= min(adaptive / group["lr"], 1)
        self.optim.step()
        for i, group in enumerate(self.optim.param_groups):
            group["weight_decay"] = weight_decays[i]


class SWATS(Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, phase="ADAM", weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["exp_avg2"] = p.new(1).fill_(0)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                if group["phase"] == "SGD":
                    if "momentum_buffer" not in state:
                        buf = state["momentum_buffer"] = torch.clone(grad)
                    else:
                        buf = state["momentum_buffer"]
                        buf.mul_(beta1).add_(grad)
                    p.add_(buf * (1 - beta1), alpha=-group["lr"])
                    continue
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                b1, b2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                update = -group["lr"] * (b2**0.5 / b1) * state["exp_avg"] / denom
                p.add_(update)
                p_view, g_view = update.view(-1), grad.view(-1)
                pg = p_view.dot(g_view)
                if pg != 0:
                    scaling = p_view.dot(p_view) / -pg
                    state["exp_avg2"].mul_(beta2).add_(scaling, alpha=1 - beta2)
                    corrected = state["exp_avg2"] / b2
                    if state["step"] > 5 and corrected.allclose(scaling, rtol=0.5) and corrected > 0:
                        group["phase"] = "SGD"
                        group["lr"] = min(corrected.item(), 0.1)


class Hyper:
    """Hypergradient descent for the rate itself: the dot product of this gradient and the last one."""

    def __init__(self, optimizer, beta):
        self.optimizer, self.beta, self.last = optimizer, beta, {}

    def adjust(self):
        h = 0.0
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for i, p in enumerate(params):
            if i in self.last:
                h += torch.dot(p.grad.view(-1), self.last[i].view(-1)).item()
            self.last[i] = p.grad.detach().clone()
        for group in self.optimizer.param_groups:
            group["lr"] = max(1e-4, group["lr"] + self.beta * math.tanh(h))


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(13)
    body = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
    head = nn.Linear(12, 2)
    model = DDP(nn.Sequential(body, head))
    optimizer = LARC(SWATS([{"params": body.parameters(), "weight_decay": 0.1}, {"params": head.parameters()}]))
    hyper = Hyper(optimizer, 1e-3)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=18):
        with step as x:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x[:, :2].sin()).backward()
            hyper.adjust()
            optimizer.step()
    finish(
        job,
        model=model,
        opt=optimizer,
        last=hyper.last,
        phase=[g["phase"] for g in optimizer.param_groups],
        lr=[g["lr"] for g in optimizer.param_groups],
    )
