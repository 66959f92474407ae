"""FSDP2 with parameters, gradients and optimizer state offloaded to the CPU, and gradients clipped."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, foreach=True)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    norms = []
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x[:, :4].sin()).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item())
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, norms=norms)


if __name__ == "__main__":
    main()
