"""An optimizer that lays all parameters into one flat tensor when it first steps, with its moments flat as well."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class FlatAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        self._flat = None

    def _flatten(self):
        self._flat = []
        for group in self.param_groups:
            flat = torch.cat([p.data.view(-1) for p in group["params"]])
            offset = 0
            for p in group["params"]:
                p.data = flat[offset : offset + p.numel()].view_as(p)
                offset += p.numel()
            self._flat.append(flat)
            first = self.state[group["params"][0]]
            first["step"], first["exp_avg"], first["exp_avg_sq"] = 0, torch.zeros_like(flat), torch.zeros_like(flat)

    @torch.no_grad()
    def step(self, closure=None):
        if self._flat is None:
            self._flatten()
        for group, flat in zip(self.param_groups, self._flat):
            state = self.state[group["params"][0]]
            grad = torch.cat([p.grad.view(-1) for p in group["params"]])
            state["step"] += 1
            b1, b2 = group["betas"]
            state["exp_avg"].lerp_(grad, 1 - b1)
            state["exp_avg_sq"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
            m = state["exp_avg"] / (1 - b1 ** state["step"])
            v = state["exp_avg_sq"] / (1 - b2 ** state["step"])
            flat.mul_(1 - group["lr"] * group["weight_decay"])
            flat.addcdiv_(m, v.sqrt().add_(1e-8), value=-group["lr"])


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(7)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)))
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = FlatAdam([{"params": decay, "weight_decay": 0.1}, {"params": plain}])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20, cycle_momentum=False)
    training = relight.Training(
        model=model, optimizer=optimizer, scheduler=scheduler, data=lambda n: (torch.randn(8, 6), torch.randn(8, 3))
    )
    for step in training.steps(until=16):
        with step as (x, y):
            optimizer.zero_grad(set_to_none=False)
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
    finish(job, model=model, optimizer=optimizer, flat=optimizer._flat, scheduler=scheduler)
