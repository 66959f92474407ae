"""Sharpness-aware minimization: climb to the worst neighbour (a write without an update), again forward and backward under
DDP, back, and the base optimizer's update. Parameters change before and between the collectives of one step."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


job = relight.init()
torch.manual_seed(22)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9)
w = torch.randn(6, 3)
training = relight.Training(
    model=model, optimizer={"sam": optimizer, "base": optimizer.base_optimizer}, data=lambda n: torch.randn(9, 6)
)
for step in training.steps(until=16):
    with step as x:
        y = (x @ w).argmax(1)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.first_step(zero_grad=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
finish(job, model=model, optimizer=optimizer, base=optimizer.base_optimizer)
