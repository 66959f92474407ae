"""A lottery ticket: train, rank weights by magnitude once, go back to the first weights, and train what is left.

The mask is None for the first steps, is made after the write of one step, and decides every later one.
"""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish

PRUNED_AT = 6
KEPT = 0.4


def ticket(model):
    """The largest weights of each layer, as masks by name."""
    masks = {}
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            threshold = weight.detach().abs().flatten().kthvalue(int(weight.numel() * (1 - KEPT))).values
            masks[name] = (weight.detach().abs() > threshold).float()
    return masks


def main():
    job = relight.init()
    torch.manual_seed(77)
    x = torch.randn(60, 8)
    data = TensorDataset(x, (x[:, :2].sum(1) > 0).long())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, job.world_size, job.rank))
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = relight.Training(model=model, optimizer=optimizer, data=loader)
    first = {name: weight.detach().clone() for name, weight in model.module.named_parameters()}
    masks = None
    for step in training.steps(until=16):
        with step as (inputs, labels):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            if masks is not None:
                for name, weight in model.module.named_parameters():
                    if name in masks:
                        weight.grad.mul_(masks[name])
            optimizer.step()
            if step.number == PRUNED_AT:
                masks = ticket(model.module)
                with torch.no_grad():
                    for name, weight in model.module.named_parameters():
                        weight.copy_(first[name] * masks.get(name, 1.0))
    finish(job, model=model, optimizer=optimizer, kept=sum(mask.sum().item() for mask in masks.values()))


if __name__ == "__main__":
    main()
