"""Gradients by reduce_scatter, the rank's own part of the optimizer, parameters by all_gather: by hand."""

# ranks: 2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(109)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    world = dist.get_world_size()
    params = list(model.parameters())
    size = sum(p.numel() for p in params)
    part = -(-size // world)
    avg, sq = torch.zeros(part), torch.zeros(part)
    training = relight.Training(model=model, data=lambda n: torch.randn(7, 5))
    for step in training.steps(until=14):
        with step as x:
            for p in params:
                p.grad = None
            (model(x) - x[:, :3]).square().mean().backward()
            flat = F.pad(torch.cat([p.grad.flatten() for p in params]), (0, part * world - size))
            mine = torch.empty(part)
            handle = dist.reduce_scatter_tensor(mine, flat / world, async_op=True)
            handle.wait()
            avg.lerp_(mine, 0.1)
            sq.lerp_(mine.square(), 0.01)
            update = torch.empty(part * world)
            dist.all_gather_into_tensor(update, avg / (sq.sqrt() + 1e-3))
            with torch.no_grad():
                for p, u in zip(params, update[:size].split([p.numel() for p in params]), strict=True):
                    p.sub_(u.view_as(p), alpha=0.01)
    finish(job, model=model, avg=avg, sq=sq)


if __name__ == "__main__":
    main()
