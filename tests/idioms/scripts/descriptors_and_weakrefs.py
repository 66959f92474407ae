"""State behind descriptors and weak dictionaries: meters by instance, cached properties, an observer list of weak methods."""

# ranks: 2
import functools
import itertools
import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Smoothed:
    """A descriptor: reading gives the mean of what was assigned, kept beside the instance."""

    def __init__(self, beta):
        self.beta, self.values = beta, weakref.WeakKeyDictionary()

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        return self if instance is None else self.values.get(instance, 1.0)

    def __set__(self, instance, value):
        old = self.values.get(instance, value)
        self.values[instance] = self.beta * old + (1 - self.beta) * value


class Counted:
    """Counts in a slot of the instance's own dict under a mangled name."""

    def __set_name__(self, owner, name):
        self.key = "_" + name

    def __get__(self, instance, owner=None):
        return getattr(instance, self.key, 0)

    def __set__(self, instance, value):
        setattr(instance, self.key, value % 7)


class Signal:
    def __init__(self):
        self._receivers = []

    def connect(self, method):
        self._receivers.append(weakref.WeakMethod(method))

    def send(self, **kwargs):
        return [r()(**kwargs) for r in self._receivers if r() is not None]


class Plugin:
    registry = []
    _ids = itertools.count()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Plugin.registry.append(cls)

    def __init__(self):
        self.id, self.weight = next(Plugin._ids), 1.0


class Decay(Plugin):
    def on_loss(self, trainer, value):
        self.weight *= 0.95
        return self.weight * value


class Bounce(Plugin):
    direction = 1

    def on_loss(self, trainer, value):
        if not 0.5 < self.weight < 1.5:
            type(self).direction *= -1
        self.weight += 0.2 * type(self).direction
        return self.weight * value


class Trainer:
    loss = Smoothed(0.8)
    norm = Smoothed(0.5)
    ticks = Counted()

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.signal = model, optimizer, Signal()
        self.plugins = [cls() for cls in Plugin.registry]
        for plugin in self.plugins:
            self.signal.connect(functools.partial(plugin.on_loss).func)

    @functools.cached_property
    def baseline(self):
        return float(self.loss) * 0.5

    def train_step(self, x):
        out = self.model(x).square().mean()
        self.loss = out.item()
        self.ticks += 2
        scale = sum(self.signal.send(trainer=self, value=self.loss)) + self.baseline + self.ticks
        self.optimizer.zero_grad()
        (out * scale / (1 + self.norm)).backward()
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self.optimizer.step()


def main():
    job = relight.init()
    torch.manual_seed(23)
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training = relight.Training(model=model, optimizer=trainer.optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=16):
        with step as x:
            trainer.train_step(x)
            if step.number % 5 == 4:
                trainer.__dict__.pop("baseline", None)
    finish(
        job,
        model=model,
        loss=trainer.loss,
        norm=trainer.norm,
        ticks=trainer.ticks,
        base=trainer.baseline,
        weights=[p.weight for p in trainer.plugins],
        direction=Bounce.direction,
    )


if __name__ == "__main__":
    main()
