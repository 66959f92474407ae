"""An optimizer class that counts its steps in an attribute, and keeps a global norm beside its state."""

# ranks: 2
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

import relight
from tests.idioms.digest import finish


class Ranger(Optimizer):
    """RAdam with Lookahead, and gradients whose norm is compared with a running one."""

    def __init__(self, params, lr=1e-2, alpha=0.5, k=3, betas=(0.9, 0.99), eps=1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.alpha, self.k = alpha, k
        self.steps_taken = 0
        self.running_norm = None
        self.buffer = [[None, None, None] for _ in range(10)]

    @torch.no_grad()
    def step(self, closure=None):
        self.steps_taken += 1
        total = math.sqrt(sum(float(p.grad.square().sum()) for g in self.param_groups for p in g["params"]))
        self.running_norm = total if self.running_norm is None else 0.9 * self.running_norm + 0.1 * total
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["slow"] = p.clone()
                b1, b2 = group["betas"]
                grad = p.grad * min(1.0, self.running_norm / (total + 1e-12))
                state["exp_avg"].mul_(b1).add_(grad, alpha=1 - b1)
                state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                buffered = self.buffer[self.steps_taken % 10]
                if buffered[0] != self.steps_taken:
                    buffered[0] = self.steps_taken
                    buffered[1] = math.sqrt(1 - b2**self.steps_taken)
                    buffered[2] = 1 / (1 - b1**self.steps_taken)
                denominator = state["exp_avg_sq"].sqrt().div_(buffered[1]).add_(group["eps"])
                p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] * buffered[2])
                if self.steps_taken % self.k == 0:
                    state["slow"].lerp_(p, self.alpha)
                    p.copy_(state["slow"])


def main():
    job = relight.init()
    torch.manual_seed(53)
    model = DDP(nn.Sequential(nn.Linear(5, 11), nn.Mish(), nn.Linear(11, 2)))
    optimizer = Ranger(model.parameters())
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(9, 5))
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2].cos()).square().mean()
            loss.backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, steps=optimizer.steps_taken, norm=optimizer.running_norm)


if __name__ == "__main__":
    main()
