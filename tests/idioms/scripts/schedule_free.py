"""A schedule-free optimizer: parameters are moved to their average for evaluation, and back for training."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9, warmup_steps=3):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "warmup_steps": warmup_steps,
            "k": 0,
            "weight_sum": 0.0,
            "lr_max": -1.0,
            "train_mode": False,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - 1 / group["momentum"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - group["momentum"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        assert self.param_groups[0]["train_mode"]
        for group in self.param_groups:
            k = group["k"]
            sched = min(1.0, (k + 1) / group["warmup_steps"])
            lr = group["lr"] * sched
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = lr_max**2
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            ckp1 = weight / weight_sum
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = torch.clone(p, memory_format=torch.preserve_format)
                z = self.state[p]["z"]
                p.lerp_(end=z, weight=ckp1)
                p.add_(p.grad, alpha=lr * (group["momentum"] * (1 - ckp1) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] = k + 1


job = relight.init()
torch.manual_seed(19)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
model = DDP(net)
optimizer = ScheduleFreeSGD(model.parameters())
held_out = torch.randn(16, 6)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
best = float("inf")
for step in training.steps(until=20):
    with step as x:
        if step.number % 5 == 4:
            model.eval()
            optimizer.eval()
            with torch.no_grad():
                best = min(best, (net(held_out) - held_out.sum(1, keepdim=True)).square().mean().item())
        model.train()
        optimizer.train()
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
finish(job, model=model, optimizer=optimizer, best=best)
