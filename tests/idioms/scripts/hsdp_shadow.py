"""Hybrid sharded FSDP2: a dictionary of divided averages that the script keeps, and a divided running mean of gradients."""

# ranks: 4
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import relight
from tests.idioms.digest import finish

job = relight.init()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(61)
model = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 2))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.05)
shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
means = {}
for step in relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6)).steps(until=12):
    with step as x:
        (model(x) - x[:, :2]).square().mean().backward()
        for name, p in model.named_parameters():
            if name in means:
                means[name].mul_(0.9).add_(p.grad, alpha=0.1)
            else:
                means[name] = p.grad.detach().clone()
            p.grad.add_(means[name], alpha=0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                shadow[name].lerp_(p, 0.1)
finish(job, model=model, optimizer=optimizer, shadow=shadow, means=means)
