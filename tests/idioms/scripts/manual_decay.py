"""Decoupled weight decay by hand with p.data.mul_ before optimizer.step(), and weight clipping after it."""

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def decay_weights(model, factor):
    for name, p in model.named_parameters():
        if "bias" not in name:
            p.data.mul_(factor)


def clip_weights(model, bound):
    for p in model.parameters():
        p.data.clamp_(-bound, bound)


def run():
    job = relight.init()
    torch.manual_seed(34)
    net = DDP(nn.Sequential(nn.Linear(5, 14), nn.ReLU(), nn.Linear(14, 14), nn.ReLU(), nn.Linear(14, 1)))
    opt = torch.optim.RMSprop(net.parameters(), lr=2e-3, centered=True)
    for step in relight.Training(model=net, optimizer=opt, data=lambda n: torch.randn(8, 5)).steps(until=16):
        with step as x:
            opt.zero_grad()
            (net(x) - x.max(1, keepdim=True).values).pow(2).mean().backward()
            decay_weights(net, 0.99)
            opt.step()
            clip_weights(net, 0.4)
    finish(job, net=net, opt=opt)


run()
