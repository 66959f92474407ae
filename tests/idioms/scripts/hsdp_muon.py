"""Hybrid sharded FSDP2 with an optimizer of the script that gathers each matrix, makes it orthogonal, and divides it."""

# ranks: 4
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import relight
from tests.idioms.digest import finish


def orthogonal(g, steps=3):
    x = g / (g.norm() + 1e-7)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buf = state["momentum_buffer"]
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = buf
                if p.ndim == 2:
                    full = orthogonal(buf.full_tensor())
                    update = distribute_tensor(full, p.device_mesh, p.placements)
                p.add_(update, alpha=-group["lr"])


def main():
    job = relight.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(103)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Muon(model.parameters())
    norms = []
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 8))
    for step in training.steps(until=12):
        with step as x:
            (model(x) - x[:, :4].tanh()).square().mean().backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
            norms.append(norm)
            scale = min(1.0, sum(norms[-4:]) / len(norms[-4:]) / (norm + 1e-6))
            for p in model.parameters():
                p.grad.mul_(scale)
            optimizer.step()
            optimizer.zero_grad()
    finish(job, model=model, optimizer=optimizer, norms=norms)


if __name__ == "__main__":
    main()
