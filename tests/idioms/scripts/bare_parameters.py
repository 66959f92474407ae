"""Parameters of no module: a network written as functions over a dict of them, a learned temperature, two optimizers."""

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish


def init_mlp(sizes):
    params = {}
    for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False)):
        params[f"w{i}"] = nn.Parameter(torch.randn(a, b) / a**0.5)
        params[f"b{i}"] = nn.Parameter(torch.zeros(b))
    return params


def apply(params, x):
    for i in range(len(params) // 2):
        x = x @ params[f"w{i}"] + params[f"b{i}"]
        if i + 1 < len(params) // 2:
            x = torch.relu(x)
    return x


def average(parameters, world_size):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= world_size


def main():
    job = relight.init()
    torch.manual_seed(12)
    params = init_mlp([6, 16, 3])
    log_temperature = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
    temperature_optimizer = torch.optim.SGD([log_temperature], lr=0.05, momentum=0.9)
    training = relight.Training(
        model={},
        optimizer={"net": optimizer, "temperature": temperature_optimizer},
        data=lambda n: (torch.randn(8, 6), torch.randint(3, (8,))),
    )
    losses = []
    for step in training.steps(until=12):
        with step as (x, y):
            logits = apply(params, x) * log_temperature.exp()
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            temperature_optimizer.zero_grad()
            loss.backward()
            average([*params.values(), log_temperature], job.world_size)
            losses.append(loss.item())
            optimizer.step()
            temperature_optimizer.step()
    finish(
        job, net=params, temperature=log_temperature, optimizer=optimizer, other=temperature_optimizer, losses=losses
    )


main()
