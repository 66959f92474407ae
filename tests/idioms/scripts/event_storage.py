"""A trainer with hooks and a stack of storages, as a detection framework has it: state in a module-level list."""

# ranks: 2
import weakref
from collections import defaultdict
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish

_CURRENT_STORAGE_STACK = []


class HistoryBuffer:
    def __init__(self, max_length=1000000):
        self._max_length, self._data, self._count, self._global_avg = max_length, [], 0, 0

    def update(self, value, iteration=None):
        if iteration is None:
            iteration = self._count
        self._data.append((value, iteration))
        self._count += 1
        self._global_avg += (value - self._global_avg) / self._count

    def median(self, window_size):
        return np.median([x[0] for x in self._data[-window_size:]])

    def global_avg(self):
        return self._global_avg


class EventStorage:
    def __init__(self, start_iter=0):
        self._history, self._latest_scalars, self.iter = defaultdict(HistoryBuffer), {}, start_iter

    def put_scalar(self, name, value):
        value = float(value)
        self._history[name].update(value, self.iter)
        self._latest_scalars[name] = (value, self.iter)

    def history(self, name):
        return self._history[name]

    def __enter__(self):
        _CURRENT_STORAGE_STACK.append(self)
        return self

    def __exit__(self, *exc):
        assert _CURRENT_STORAGE_STACK[-1] == self
        _CURRENT_STORAGE_STACK.pop()


def get_event_storage():
    return _CURRENT_STORAGE_STACK[-1]


class HookBase:
    trainer = None

    def before_step(self):
        pass

    def after_step(self):
        pass


class Warmup(HookBase):
    def before_step(self):
        factor = min(1.0, (self.trainer.iter + 1) / 5)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = 0.05 * factor


class LossGuard(HookBase):
    """Halves the scale of the loss where the median of the last losses is above their average."""

    def __init__(self):
        self.scale = 1.0

    def after_step(self):
        history = get_event_storage().history("loss")
        if history.median(4) > history.global_avg():
            self.scale *= 0.5
        else:
            self.scale = min(1.0, self.scale * 1.5)


class TrainerBase:
    def __init__(self):
        self._hooks = []

    def register_hooks(self, hooks):
        for h in hooks:
            h.trainer = weakref.proxy(self)
        self._hooks.extend(hooks)

    def train(self, max_iter):
        self.iter = 0
        with EventStorage(0) as self.storage:
            for step in self.training.steps(until=max_iter):
                with step as self.batch:
                    self.iter = step.number
                    self.storage.iter = self.iter
                    for h in self._hooks:
                        h.before_step()
                    self.run_step()
                    for h in self._hooks:
                        h.after_step()


class SimpleTrainer(TrainerBase):
    def __init__(self, model, optimizer):
        super().__init__()
        model.train()
        self.model, self.optimizer = model, optimizer
        self.guard = LossGuard()
        self.training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
        self.register_hooks([Warmup(), self.guard])

    def run_step(self):
        losses = {"cls": self.model(self.batch).square().mean(), "reg": self.model.module[0].weight.abs().mean() * 0.01}
        total = sum(losses.values()) * self.guard.scale
        self.optimizer.zero_grad()
        total.backward()
        self._write_metrics(losses)
        self.optimizer.step()

    def _write_metrics(self, losses):
        values = torch.stack([v.detach() for v in losses.values()])
        torch.distributed.all_reduce(values)
        get_event_storage().put_scalar("loss", values.sum() / 2)


@contextmanager
def launched():
    yield relight.init()


if __name__ == "__main__":
    with launched() as job:
        torch.manual_seed(8)
        model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
        trainer = SimpleTrainer(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
        trainer.train(18)
        history = trainer.storage.history("loss")
        finish(job, model=model, optimizer=trainer.optimizer, scale=trainer.guard.scale, average=history.global_avg())
