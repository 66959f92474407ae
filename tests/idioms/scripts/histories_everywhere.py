"""Histories in every place that a script may choose, each appended to above the block, in it and after it.

Modules of torch and of the script, optimizers and their groups, schedulers, parameters, functions, classes, objects.
"""

import argparse
import contextvars
import functools
import sys
import threading
import types
from collections import namedtuple
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

import relight
from tests.idioms.digest import finish

TIMES = ("above", "block", "after")
Pair = namedtuple("Pair", "first history")
of_context = contextvars.ContextVar("of_context")
of_thread = threading.local()


def new():
    return {time: [] for time in TIMES}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Dropout(0.1)])
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.layers[1](torch.tanh(self.layers[0](x))))


class Tracker:
    def __init__(self):
        self.history = new()


class Slotted:
    __slots__ = ("history",)

    def __init__(self):
        self.history = new()


@dataclass
class Record:
    history: dict = field(default_factory=new)


class Log(list):
    pass


def helper():
    pass


def enclosing():
    history = new()
    return lambda: history


def attached(owner, name="history_of_steps", value=None):
    """Give an object such an attribute, or a dict such an item. Returns the way to it."""
    value = new() if value is None else value
    if isinstance(owner, dict):
        owner[name] = value
        return lambda: owner[name]
    setattr(owner, name, value)
    return lambda: getattr(owner, name)


def tracked(owner, name="tracker"):
    tracker = attached(owner, name, Tracker())
    return lambda: tracker().history


def main():
    job = relight.init()
    torch.manual_seed(31)
    net, aside, layer = Net(), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    training = relight.Training(
        model={"net": net, "aside": aside, "layer": layer}, optimizer=optimizer, scheduler=scheduler
    )
    owners = [net, net.last, net.layers, net.layers[1], aside, layer, optimizer, optimizer.param_groups[0], scheduler]
    owners += [net.last.weight, helper, sys.modules[__name__], of_thread, Tracker, Net, argparse.Namespace()]
    homes = [attached(owner) for owner in owners]
    homes += [tracked(owner) for owner in (net, optimizer, optimizer.param_groups[0], net.last.bias)]
    net.last.trackers, layer.pair, net.space = [Tracker()], (Tracker(), 1), types.SimpleNamespace(inner=Tracker())
    local, tracker, slotted, record, log = new(), Tracker(), Slotted(), Record(), Log()
    pair, partial, nested = Pair(1, new()), functools.partial(helper, history=new()), (1, [new()])
    of_context.set(new())
    homes += [lambda: net.last.trackers[0].history, lambda: layer.pair[0].history, lambda: net.space.inner.history]
    homes += [lambda: local, lambda: tracker.history, lambda: slotted.history, lambda: record.history, attached(log)]
    homes += [lambda: pair.history, lambda: partial.keywords["history"], lambda: nested[1][0], enclosing()]
    homes += [of_context.get]

    def touch(time, number):
        for home in homes:
            home()[time].append(number)

    for step in training.steps(until=12):
        touch("above", step.number)
        with step:
            loss = (net(torch.randn(16, 8)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            touch("block", step.number)
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= job.world_size
            optimizer.step()
            scheduler.step()
        touch("after", step.number)
    histories = {str(number): home() for number, home in enumerate(homes)}
    finish(job, model=net, optimizer=optimizer, scheduler=scheduler, **histories)


main()
