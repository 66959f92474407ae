"""Optimizers from papers' notebooks: `p.data = p.data - lr * d` and gradients centred in hooks; AdaBound's moving bounds."""

# ranks: 2
import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AdaBound(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), final_lr=0.1, gamma=1e-2, eps=1e-8, amsbound=True):
        super().__init__(params, dict(lr=lr, betas=betas, final_lr=final_lr, gamma=gamma, eps=eps, amsbound=amsbound))
        self.base_lrs = list(map(lambda group: group["lr"], self.param_groups))

    def step(self, closure=None):
        for group, base_lr in zip(self.param_groups, self.base_lrs):
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                    state["max_exp_avg_sq"] = torch.zeros_like(p.data)
                beta1, beta2 = group["betas"]
                state["step"] += 1
                state["exp_avg"] = state["exp_avg"] * beta1 + (1 - beta1) * grad
                state["exp_avg_sq"] = state["exp_avg_sq"] * beta2 + (1 - beta2) * grad * grad
                state["max_exp_avg_sq"] = torch.max(state["max_exp_avg_sq"], state["exp_avg_sq"])
                denom = state["max_exp_avg_sq"].sqrt().add_(group["eps"])
                bc1, bc2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                step_size = group["lr"] * math.sqrt(bc2) / bc1
                final_lr = group["final_lr"] * group["lr"] / base_lr
                lower = final_lr * (1 - 1 / (group["gamma"] * state["step"] + 1))
                upper = final_lr * (1 + 1 / (group["gamma"] * state["step"]))
                rate = torch.full_like(denom, step_size).div_(denom).clamp_(lower, upper)
                p.data = p.data - rate * state["exp_avg"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.fc = nn.Linear(6 * 8, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))


def centralize(grad):
    return grad - grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True) if grad.dim() > 1 else grad


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(3)
    net = Net()
    for p in net.parameters():
        p.register_hook(centralize)
    ddp = DDP(net)
    optimizer = AdaBound(ddp.parameters())
    history = []
    training = relight.Training(
        model=ddp, optimizer=optimizer, data=lambda n: (torch.randn(6, 2, 8), torch.randint(0, 3, (6,)))
    )
    for step in training.steps(until=16):
        with step as (x, y):
            loss = nn.functional.cross_entropy(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            history += [mean.item()]
            if len(history) > 4 and history[-1] > max(history[-4:-1]):
                optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
    finish(job, net=ddp, opt=optimizer, history=history)
