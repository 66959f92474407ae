"""Momentum by Newton-Schulz, each rank its own parameters, gathered asynchronously: modded nanoGPT."""

# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


def newton_schulz(g, steps=3):
    x = g / (g.norm() + 1e-7)
    if g.size(0) > g.size(1):
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.size(0) > g.size(1) else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        params = sorted(params, key=lambda p: p.numel(), reverse=True)
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            handles, pending = [], []
            for p in params:
                handles.append(dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, async_op=True))
            for h in handles:
                h.wait()
            padded = params + [torch.empty_like(params[-1])] * (-len(params) % self.world)
            for base in range(0, len(padded), self.world):
                i = base + self.rank
                if i < len(params):
                    p = params[i]
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                    p.add_(newton_schulz(p.grad.lerp(state["momentum"], group["momentum"])), alpha=-group["lr"])
                for k in range(self.world):
                    if base + k < len(params):
                        pending.append(dist.broadcast(params[base + k], src=k, async_op=True))
            for h in pending:
                h.wait()


def main():
    job = relight.init()
    torch.manual_seed(113)
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)
    )
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, 0.01)
    training = relight.Training(
        model=model, optimizer={"adam": adam}, per_rank={"muon": muon}, data=lambda n: torch.randn(7, 6)
    )
    for step in training.steps(until=14):
        with step as x:
            for group in muon.param_groups:
                group["momentum"] = 0.85 + 0.1 * min(step.number / 10, 1)
            model.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            for p in others:
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG if False else dist.ReduceOp.SUM)
            adam.step()
            muon.step()
    finish(job, model=model, muon=muon, adam=adam)


if __name__ == "__main__":
    main()
