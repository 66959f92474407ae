"""Algorithms that match events on a state object; times with units that are immutable; a timestamp replaced in each batch."""

# ranks: 2
from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Event(str, Enum):
    BATCH_START = "batch_start"
    AFTER_FORWARD = "after_forward"
    AFTER_BACKWARD = "after_backward"
    BATCH_END = "batch_end"


class TimeUnit(str, Enum):
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"


class Time:
    def __init__(self, value, unit):
        self._value, self._unit = value, TimeUnit(unit)

    @classmethod
    def from_timestring(cls, text):
        return cls(int(text[:-2]), text[-2:])

    @property
    def value(self):
        return self._value

    def __add__(self, other):
        return Time(self._value + (other.value if isinstance(other, Time) else other), self._unit)

    def __ge__(self, other):
        assert self._unit == other._unit
        return self._value >= other._value

    def __mod__(self, other):
        return self._value % other


@dataclass(frozen=True)
class Timestamp:
    epoch: Time = Time(0, "ep")
    batch: Time = Time(0, "ba")
    sample: Time = Time(0, "sp")

    def to_next_batch(self, samples):
        return replace(self, batch=self.batch + 1, sample=self.sample + samples)

    def to_next_epoch(self):
        return replace(self, epoch=self.epoch + 1)


class State:
    serialized = ("timestamp", "scale")

    def __init__(self, model, optimizer):
        self.model, self.optimizers = model, (optimizer,)
        self.timestamp, self.batch, self.outputs, self.loss, self.scale = Timestamp(), None, None, None, 1.0
        self._mixing, self.algorithms_run = None, []


class Algorithm:
    def match(self, event, state):
        raise NotImplementedError

    def apply(self, event, state):
        raise NotImplementedError


class CutMix(Algorithm):
    def match(self, event, state):
        return event in (Event.BATCH_START, Event.AFTER_FORWARD)

    def apply(self, event, state):
        if event is Event.BATCH_START:
            x, y = state.batch
            self._indices, self._lam = torch.randperm(len(x)), float(torch.rand(()))
            state.batch = (torch.where(torch.rand(x.size(1)) < self._lam, x, x[self._indices]), y)
        else:
            x, y = state.batch
            state.loss = self._lam * nn.functional.cross_entropy(state.outputs, y) + (
                1 - self._lam
            ) * nn.functional.cross_entropy(state.outputs, y[self._indices])


class LayerFreezing(Algorithm):
    def __init__(self, start):
        self.start = Time.from_timestring(start)

    def match(self, event, state):
        return event is Event.BATCH_END and state.timestamp.batch >= self.start

    def apply(self, event, state):
        for p in state.model.module[0].parameters():
            p.requires_grad_(False)
        for opt in state.optimizers:
            for group in opt.param_groups:
                group["weight_decay"] *= 0.9


class GradientClipping(Algorithm):
    def __init__(self):
        self.history = ()

    def match(self, event, state):
        return event == Event.AFTER_BACKWARD

    def apply(self, event, state):
        limit = sorted(self.history)[len(self.history) // 2] if self.history else 1.0
        norm = nn.utils.clip_grad_norm_(state.model.parameters(), limit * 1.1)
        self.history = (*self.history[-4:], float(norm))


class Engine:
    def __init__(self, state, algorithms):
        self.state, self.algorithms, self.traces = state, algorithms, {}

    def run_event(self, event):
        event = Event(event)
        for algorithm in self.algorithms:
            if algorithm.match(event, self.state):
                algorithm.apply(event, self.state)
                key = f"{type(algorithm).__name__}/{event.value}"
                self.traces[key] = self.traces.get(key, 0) + 1


class Trainer:
    def __init__(self, state, engine, training):
        self.state, self.engine, self.training = state, engine, training

    def fit(self, duration):
        for step in self.training.steps(until=Time.from_timestring(duration).value):
            with step as self.state.batch:
                self._train_batch()

    def _train_batch(self):
        state = self.state
        self.engine.run_event("batch_start")
        for opt in state.optimizers:
            opt.zero_grad()
        state.outputs = state.model(state.batch[0])
        self.engine.run_event("after_forward")
        if any(p.requires_grad for p in state.model.parameters()):
            state.loss.backward()
        self.engine.run_event("after_backward")
        for opt in state.optimizers:
            opt.step()
        state.timestamp = state.timestamp.to_next_batch(len(state.batch[0]))
        if state.timestamp.batch % 4 == 0:
            state.timestamp = state.timestamp.to_next_epoch()
        self.engine.run_event("batch_end")


if __name__ == "__main__":
    job = relight.init()
    torch.manual_seed(33)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    state = State(model, optimizer)
    engine = Engine(state, [CutMix(), GradientClipping(), LayerFreezing("9ba")])
    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(8, 6), torch.randint(0, 3, (8,)))
    )
    Trainer(state, engine, training).fit("16ba")
    finish(
        job,
        model=model,
        opt=optimizer,
        batch=state.timestamp.batch.value,
        epoch=state.timestamp.epoch.value,
        sample=state.timestamp.sample.value,
        traces=engine.traces,
        history=engine.algorithms[1].history,
    )
