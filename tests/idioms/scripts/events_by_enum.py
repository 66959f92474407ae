"""An engine whose handlers lie in a dict by members of an Enum: closures, objects with state, lambdas in objects."""

# ranks: 2
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import relight
from tests.idioms.digest import finish


class Events(Enum):
    EPOCH_STARTED = "epoch_started"
    ITERATION_STARTED = "iteration_started"
    ITERATION_COMPLETED = "iteration_completed"
    EPOCH_COMPLETED = "epoch_completed"


@dataclass
class State:
    iteration: int = 0
    epoch: int = 0
    output: dict = field(default_factory=dict)
    metrics: dict = field(default_factory=dict)


class Engine:
    def __init__(self, process_function, training):
        self.process_function, self.training, self.state = process_function, training, State()
        self.handlers, self.counts, self.should_terminate = defaultdict(list), defaultdict(int), False

    def on(self, event, every=1):
        def decorator(function):
            self.handlers[event].append((function, every, ()))
            return function

        return decorator

    def fire(self, event):
        self.counts[event] += 1
        for handler, every, arguments in self.handlers[event]:
            if self.counts[event] % every == 0:
                handler(self, *arguments)

    def run(self, epochs):
        for epoch in self.training.epochs(epochs):
            self.state.epoch = epoch + 1
            self.fire(Events.EPOCH_STARTED)
            self.run_epoch()
            self.fire(Events.EPOCH_COMPLETED)
            if self.should_terminate:
                break
        return self.state

    def run_epoch(self):
        for step in self.training.steps():
            with step as batch:
                self.state.iteration += 1
                self.fire(Events.ITERATION_STARTED)
                self.state.output = self.process_function(self, batch)
                self.fire(Events.ITERATION_COMPLETED)


class Progress:
    def __init__(self):
        self.lines, self.smoothed = [], None

    def __call__(self, engine):
        loss = engine.state.output["loss"]
        self.smoothed = loss if self.smoothed is None else 0.9 * self.smoothed + 0.1 * loss
        self.lines.append(f"[{engine.state.epoch}/{engine.state.iteration}] {self.smoothed:.6f}")


class EarlyStop:
    def __init__(self, patience, score, trainer):
        self.patience, self.score, self.trainer, self.counter, self.best = patience, score, trainer, 0, None

    def __call__(self, engine):
        score = self.score(engine)
        if self.best is None or score > self.best:
            self.best, self.counter = score, 0
        else:
            self.counter += 1
            self.trainer.should_terminate = self.counter >= self.patience


def main():
    job = relight.init()
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.8)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    training = relight.Training(model=model, optimizer=optimizer, data=loader)

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(engine.state.metrics.get("scale", 1.0) * model(x), y)
        loss.backward()
        optimizer.step()
        return {"loss": loss.item()}

    trainer, progress, history = Engine(update, training), Progress(), []
    trainer.handlers[Events.ITERATION_COMPLETED].append((progress, 1, ()))

    @trainer.on(Events.ITERATION_STARTED, every=3)
    def rescale(engine):
        engine.state.metrics["scale"] = engine.state.metrics.get("scale", 1.0) * 0.95

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        with torch.no_grad():
            hits = model.module(data.tensors[0]).argmax(1) == data.tensors[1]
        engine.state.metrics["accuracy"] = hits.float().mean().item()
        history.append((engine.state.epoch, engine.state.metrics["accuracy"], engine.state.output["loss"]))

    stop = EarlyStop(2, lambda engine: engine.state.metrics["accuracy"], trainer)
    trainer.handlers[Events.EPOCH_COMPLETED].append((stop, 1, ()))
    state = trainer.run(3)
    counts = {event.value: count for event, count in trainer.counts.items()}
    finish(
        job, model=model, optimizer=optimizer, state=vars(state), history=history, lines=progress.lines, counts=counts
    )


if __name__ == "__main__":
    main()
