"""Hierarchical averaging in pairs of ranks, every second step over all; metrics by reduce_scatter and gather."""

# ranks: 4
import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    pair, pairs = dist.new_subgroups(2)
    torch.manual_seed(91)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    meters = torch.zeros(world)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=pair)
                dist.all_reduce(p.grad)
                p.grad /= 2 * world
            losses = [torch.zeros(1) for _ in range(world)]
            dist.all_gather(losses, loss.detach().view(1))
            meters.mul_(0.9).add_(torch.cat(losses), alpha=0.1)
            mine = torch.empty(1)
            dist.reduce_scatter_tensor(mine, meters.clone())
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + meters.mean().item())
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, meters=meters, pairs=len(pairs), rank=rank)


if __name__ == "__main__":
    main()
