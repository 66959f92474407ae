"""Handlers found by name in a table, an event bus, and visitors: what a step changes is not in its code."""

# ranks: 2
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

REGISTRY = {}


def register(name):
    def inside(function):
        REGISTRY[name] = function
        return function

    return inside


class State:
    def __init__(self):
        self.scale, self.events, self.streak = 1.0, 0, 0


STATE = State()


@register("low")
def on_low(loss):
    STATE.streak += 1
    STATE.scale = STATE.scale * 1.05


@register("high")
def on_high(loss):
    STATE.streak = 0
    setattr(STATE, "scale", STATE.scale * 0.8)


class Bus:
    def __init__(self):
        self.listeners = {}
        self.sent = 0

    def on(self, name, listener):
        self.listeners.setdefault(name, []).append(listener)

    def send(self, name, *args):
        self.sent += 1
        for listener in self.listeners.get(name, ()):
            listener(*args)


class Meter:
    def __init__(self):
        self.mean = 0.0
        self.window = deque(maxlen=3)

    def listen(self, loss):
        self.mean = 0.5 * self.mean + 0.5 * loss
        self.window.append(loss)


def main():
    job = relight.init()
    torch.manual_seed(41)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bus, meter = Bus(), Meter()
    bus.on("loss", meter.listen)
    bus.on("loss", lambda loss: STATE.__dict__.update(events=STATE.events + 1))
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=15):
        with step as x:
            optimizer.zero_grad()
            loss = (model(x) * STATE.scale - x[:, :3]).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            REGISTRY["low" if mean < 2.5 * dist.get_world_size() / 2 else "high"](mean.item())
            if step.number >= 4:
                bus.send("loss", mean.item() + 0.01 * meter.mean)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + meter.mean + sum(meter.window) + 0.01 * STATE.events)
            optimizer.step()
    finish(job, model=model, state=vars(STATE), mean=meter.mean, window=meter.window, sent=bus.sent)


if __name__ == "__main__":
    main()
