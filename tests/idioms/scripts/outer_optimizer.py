"""DiLoCo: ranks train copies of their own, and every few steps an outer optimizer moves the shared model."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish

job = relight.init()
torch.manual_seed(18)
shared = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 1))
local = copy.deepcopy(shared)
inner = torch.optim.AdamW(local.parameters(), 0.01)
outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
training = relight.Training(
    model=shared, optimizer=outer, data=lambda n: torch.randn(8, 5), per_rank={"local": local, "inner": inner}
)
for step in training.steps(until=20):
    with step as x:
        inner.zero_grad()
        (local(x) - x.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(local.parameters(), 1.0)
        inner.step()
        if step.number % 5 == 4:
            for param, mine in zip(shared.parameters(), local.parameters()):
                param.grad = param.data - mine.data
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            outer.step()
            outer.zero_grad()
            local.load_state_dict(shared.state_dict())
finish(job, shared=shared, local=local, inner=inner, outer=outer)
