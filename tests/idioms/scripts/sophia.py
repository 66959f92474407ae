"""An optimizer with a Hessian that it updates from a second backward pass, after the write of every fourth step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class SophiaG(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.965, 0.99), rho=0.04, weight_decay=1e-1):
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho, "weight_decay": weight_decay})

    @torch.no_grad()
    def update_hessian(self):
        for group in self.param_groups:
            _, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.zeros((1,), dtype=torch.float)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["hessian"] = torch.zeros_like(p)
                state["hessian"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    @torch.no_grad()
    def step(self, closure=None, bs=64):
        for group in self.param_groups:
            beta1, _ = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.zeros((1,), dtype=torch.float)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["hessian"] = torch.zeros_like(p)
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                ratio = (state["exp_avg"].abs() / (group["rho"] * bs * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


job = relight.init()
torch.manual_seed(11)
model = DDP(nn.Sequential(nn.Embedding(20, 12), nn.Flatten(), nn.Linear(48, 20)))
optimizer = SophiaG(model.parameters())
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randint(20, (6, 5)))
k = 4
for step in training.steps(until=18):
    with step as tokens:
        x, y = tokens[:, :4], tokens[:, 4]
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(bs=6)
        optimizer.zero_grad(set_to_none=True)
        if step.number % k == k - 1:
            logits = model(x)
            y_sample = torch.distributions.Categorical(logits=logits).sample()
            F.cross_entropy(logits, y_sample).backward()
            optimizer.update_hessian()
            optimizer.zero_grad(set_to_none=True)
finish(job, model=model, optimizer=optimizer)
