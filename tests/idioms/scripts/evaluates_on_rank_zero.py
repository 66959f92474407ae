"""Rank 0 alone evaluates after the block, with the weights of an average in the place of the model's."""

import copy

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def main():
    job = relight.init()
    torch.manual_seed(39)
    net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
    average = copy.deepcopy(net)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    training = relight.Training(
        model={"model": model, "average": average}, optimizer=optimizer, data=lambda n: torch.randn(8, 5)
    )
    for step in training.steps(until=18):
        with step as x:
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, weight in zip(average.parameters(), net.parameters(), strict=True):
                    mean.lerp_(weight, 0.2)
        if step.committed and job.rank == 0 and step.number % 3 == 2:
            own = [weight.data.clone() for weight in net.parameters()]
            for weight, mean in zip(net.parameters(), average.parameters(), strict=True):
                weight.data.copy_(mean.data)
            print(f"step {step.number}: {net(torch.ones(1, 5)).item():.3f}")
            for weight, before in zip(net.parameters(), own, strict=True):
                weight.data.copy_(before)
    finish(job, model=model, average=average, optimizer=optimizer)


if __name__ == "__main__":
    main()
