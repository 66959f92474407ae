"""Experts balanced without a loss of their own: after the write, a bias follows the load that all ranks had together."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Router(nn.Module):
    def __init__(self, dim, experts, top_k=2):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.top_k = top_k
        self.register_buffer("expert_bias", torch.zeros(experts))
        self.register_buffer("tokens_per_expert", torch.zeros(experts), persistent=False)

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        _, chosen = torch.topk(scores + self.expert_bias, self.top_k, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        with torch.no_grad():
            self.tokens_per_expert += (weights > 0).sum(0)
        return weights / weights.sum(1, keepdim=True)


class MoE(nn.Module):
    def __init__(self, dim=8, experts=4):
        super().__init__()
        self.router = Router(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 12), nn.SiLU(), nn.Linear(12, dim)) for _ in range(experts)
        )

    def forward(self, x):
        weights = self.router(x)
        return x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@torch.no_grad()
def update_expert_bias(router, coeff=0.01):
    load = router.tokens_per_expert.clone()
    dist.all_reduce(load)
    router.expert_bias += coeff * torch.sign(load.mean() - load)
    router.tokens_per_expert.zero_()


job = relight.init()
torch.manual_seed(33)
model = DDP(MoE(), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(12, 8))
for step in training.steps(until=18):
    with step as x:
        loss = (model(x) - x.roll(1, 1)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_expert_bias(model.module.router)
finish(job, model=model, optimizer=optimizer)
