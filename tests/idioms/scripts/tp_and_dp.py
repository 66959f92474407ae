"""Tensor parallelism inside, replicas outside: a mesh of two dimensions, and a norm that is kept as a DTensor."""

# ranks: 4
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import relight
from tests.idioms.digest import finish


class Mlp(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def main():
    job = relight.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(104)
    model = nn.Sequential(Mlp(8), Mlp(8))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for p in model.parameters():
        torch.distributed.broadcast(p.to_local() if hasattr(p, "to_local") else p.data, 0) if False else None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    group = mesh["dp"].get_group()
    smoothed = None
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 8))
    for step in training.steps(until=12):
        with step as x:
            optimizer.zero_grad()
            (model(x) - x.flip(1)).square().mean().backward()
            for p in model.parameters():
                grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                torch.distributed.all_reduce(grad, group=group)
                grad /= 2
            weight = model[0].up.weight
            smoothed = weight.grad.detach().clone() if smoothed is None else smoothed * 0.9 + weight.grad * 0.1
            weight.grad.copy_(smoothed)
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, smoothed=smoothed)


if __name__ == "__main__":
    main()
