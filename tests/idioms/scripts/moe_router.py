"""Mixture of experts with noisy top-k routing; experts that get no token have no gradient (find_unused_parameters), and a
balancing bias on the router is moved by hand after each step by the load of all ranks."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

N_EXPERTS, TOP_K, D = 4, 1, 8


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, N_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 12), nn.ReLU(), nn.Linear(12, D)) for _ in range(N_EXPERTS)
        )
        self.register_buffer("e_score_correction_bias", torch.zeros(N_EXPERTS))
        self.register_buffer("load", torch.zeros(N_EXPERTS), persistent=False)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        if self.training:
            scores = scores + 0.02 * torch.randn_like(scores)
        _, chosen = (scores + self.e_score_correction_bias).topk(TOP_K, dim=-1)
        self.load = F.one_hot(chosen, N_EXPERTS).float().sum((0, 1))
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, _ = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                out[rows] = out[rows] + scores[rows, i : i + 1] * expert(x[rows])
        return out


@torch.no_grad()
def update_bias(moe, speed=0.01):
    load = moe.load.clone()
    dist.all_reduce(load)
    moe.e_score_correction_bias += speed * torch.sign(load.mean() - load)


job = relight.init()
torch.manual_seed(13)
moe = MoE()
model = DDP(moe, find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
target = torch.randn(D, D)
for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(5, D)).steps(until=18):
    with step as x:
        loss = F.mse_loss(model(x), torch.sin(x @ target))
        loss.backward()
        update_bias(moe)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
finish(job, model=model, optimizer=optimizer)
