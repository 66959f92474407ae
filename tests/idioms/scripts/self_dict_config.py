"""Configs whose __dict__ is themselves, and dicts whose __getattr__ raises KeyError: as settings, as state that steps
change, as a class attribute, in a list of experiments."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AttrDict(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class dotdict(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


class EasyDict(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self[name] = value


class Delegating:
    def __init__(self):
        self.count, self.inner = 0, {"scale": 1.0}

    def __getattr__(self, name):
        return self.inner[name]


class Solver:
    cfg = dotdict(lr=0.1, momentum=0.0)
    meters = AttrDict(loss=0.0, n=0)

    def __init__(self, model):
        self.model, self.state = model, dotdict(step=0, best=dotdict(loss=1e9, step=-1))
        self.runs = [AttrDict(name="a", seen=0), EasyDict(name="b", seen=0)]
        self.slots = Delegating()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=self.cfg.lr, momentum=self.cfg.momentum)

    def step(self, x):
        out = self.model(x) * self.slots.scale
        loss = out.square().mean() + 0.01 * self.meters.n
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.cfg.lr / (1 + self.runs[1].seen)
        if loss.item() < self.state.best.loss:
            self.state.best = dotdict(loss=loss.item(), step=self.state.step)
        self.state.step += 1
        self.meters.loss += loss.item()
        self.meters.n += 1
        run = self.runs[self.state.step % 2]
        run.seen += 1
        self.slots.count += 1
        self.slots.inner["scale"] *= 0.99
        if self.state.step > 8:
            self.cfg.lr *= 0.95
            run.late = self.state.step
        self.optimizer.step()


job = relight.init()
torch.manual_seed(0)
solver = Solver(DDP(nn.Linear(6, 3)))
training = relight.Training(model=solver.model, optimizer=solver.optimizer, data=lambda n: torch.randn(5, 6))
for step in training.steps(until=18):
    with step as x:
        solver.step(x)
finish(
    job, model=solver.model, optimizer=solver.optimizer, state=solver.state, meters=solver.meters, cfg=solver.cfg,
    runs=solver.runs, slots=[solver.slots.count, solver.slots.inner],
)  # fmt: skip
