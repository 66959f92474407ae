"""Rprop over a whole small set, with patience on the loss that ends the loop."""

# ranks: 2
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(3)
    x = torch.randn(32, 6)
    y = x[:, :2] * x[:, 2:4]
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    training = relight.Training(model=model, optimizer=optimizer)
    losses = []
    for step in training.steps(until=40):
        with step:
            optimizer.zero_grad()
            own = slice(job.rank, None, job.world_size)
            loss = (model(x[own]) - y[own]).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item())
            optimizer.step()
            if step.number == 5:
                for group in optimizer.param_groups:
                    group["etas"] = (0.4, 1.1)
            done = len(losses) > 8 and min(losses[-4:]) > 0.98 * min(losses[:-4])
        if done:
            break
    finish(job, model=model, optimizer=optimizer, losses=losses)


if __name__ == "__main__":
    main()
