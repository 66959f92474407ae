"""Freezing by name patterns in phases, with the optimizer's groups rebuilt lazily through add_param_group."""

import fnmatch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

PHASES = {0: ("*head*",), 5: ("*head*", "*2.*"), 9: ("*",)}


def main():
    job = relight.init()
    torch.manual_seed(108)
    net = nn.Sequential()
    net.add_module("0", nn.Linear(6, 8))
    net.add_module("1", nn.ReLU())
    net.add_module("2", nn.Linear(8, 8))
    net.add_module("head", nn.Linear(8, 2))
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.Adam(net.head.parameters(), 0.02)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 6))
    for step in training.steps(until=14):
        with step as x:
            patterns = PHASES[max(k for k in PHASES if k <= step.number)]
            for name, p in net.named_parameters():
                active = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
                p.requires_grad_(active)
                if active and id(p) not in known:
                    known.add(id(p))
                    optimizer.add_param_group({"params": [p], "lr": 0.005})
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
    finish(job, model=model, optimizer=optimizer, groups=len(optimizer.param_groups))


if __name__ == "__main__":
    main()
