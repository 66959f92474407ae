"""An engine with events that are filtered by `every` and `once`, handlers as decorated closures, metrics attached by name."""

# ranks: 2
import functools
import weakref
from collections import defaultdict
from enum import Enum

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class CallableEventWithFilter:
    def __init__(self, value, event_filter=None):
        self.value, self.filter = value, event_filter

    def __call__(self, every=None, once=None):
        if every is not None:
            return CallableEventWithFilter(self.value, lambda engine, event: event % every == 0)
        return CallableEventWithFilter(self.value, lambda engine, event: event == once)


class Events(Enum):
    ITERATION_STARTED = CallableEventWithFilter("iteration_started")
    LOSS_COMPLETED = CallableEventWithFilter("loss_completed")
    ITERATION_COMPLETED = CallableEventWithFilter("iteration_completed")

    def __call__(self, **kwargs):
        return self.value(**kwargs)


class State:
    event_to_attr = {
        "iteration_started": "iteration",
        "loss_completed": "iteration",
        "iteration_completed": "iteration",
    }

    def __init__(self, **kwargs):
        self.iteration, self.epoch, self.output, self.batch, self.metrics = 0, 0, None, None, {}
        for k, v in kwargs.items():
            setattr(self, k, v)


class Engine:
    def __init__(self, process_function):
        self._event_handlers, self._process_function, self.state = defaultdict(list), process_function, State()

    def add_event_handler(self, event_name, handler, *args, **kwargs):
        if isinstance(event_name, Events):
            event_name = event_name.value
        if event_name.filter is not None:
            inner, event_filter = handler, event_name.filter

            @functools.wraps(inner)
            def handler(engine, *a, **k):
                if event_filter(engine, getattr(engine.state, State.event_to_attr[event_name.value])):
                    return inner(engine, *a, **k)

        self._event_handlers[event_name.value].append((handler, (weakref.ref(self), *args), kwargs))

    def on(self, event_name, *args, **kwargs):
        def decorator(f):
            self.add_event_handler(event_name, f, *args, **kwargs)
            return f

        return decorator

    def fire_event(self, event):
        for func, (first, *others), kwargs in self._event_handlers[event.value.value]:
            func(first(), *others, **kwargs)

    def run(self, training, until):
        for step in training.steps(until=until):
            with step as self.state.batch:
                self.state.iteration += 1
                self.fire_event(Events.ITERATION_STARTED)
                self.state.output = self._process_function(self, self.state.batch)
                self.fire_event(Events.ITERATION_COMPLETED)
        return self.state


class RunningAverage:
    def __init__(self, alpha=0.9, output_transform=lambda x: x):
        self.alpha, self._output_transform, self._value = alpha, output_transform, None

    def attach(self, engine, name):
        engine.add_event_handler(Events.LOSS_COMPLETED, self.update, name)

    def update(self, engine, name):
        value = self._output_transform(engine.state.pending)
        self._value = value if self._value is None else self._value * self.alpha + (1 - self.alpha) * value
        engine.state.metrics[name] = self._value


class TerminateOnStall:
    def __init__(self, patience, score_name, min_delta=0.0):
        self.patience, self.score_name, self.min_delta, self.counter, self.best_score = (
            patience,
            score_name,
            min_delta,
            0,
            None,
        )

    def __call__(self, engine):
        score = -engine.state.metrics[self.score_name]
        if self.best_score is None or score > self.best_score + self.min_delta:
            self.best_score, self.counter = score, 0
        else:
            self.counter += 1
            if self.counter >= self.patience:
                engine.state.alpha *= 0.5
                self.counter = 0


def create_supervised_trainer(model, optimizer, loss_fn):
    def _update(engine, batch):
        x, y = batch
        model.train()
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        (loss * engine.state.alpha).backward()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        engine.state.pending = mean.item() / torch.distributed.get_world_size()
        engine.fire_event(Events.LOSS_COMPLETED)
        optimizer.step()
        return loss.item()

    trainer = Engine(_update)
    trainer.state.alpha = 1.0
    return trainer


def main():
    job = relight.init()
    torch.manual_seed(17)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    RunningAverage(0.7).attach(trainer, "loss")
    trainer.add_event_handler(Events.LOSS_COMPLETED(every=2), TerminateOnStall(1, "loss"))
    warm, noted = 4, []

    @trainer.on(Events.ITERATION_STARTED)
    def warmup(engine):
        nonlocal warm
        if warm:
            warm -= 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + warm)

    @trainer.on(Events.LOSS_COMPLETED(once=6))
    def swap_activation_scale(engine):
        engine.state.alpha *= 3

    @trainer.on(Events.LOSS_COMPLETED(every=5))
    def note(engine):
        noted.append((engine.state.iteration, engine.state.metrics["loss"]))
        if len(noted) > 1 and noted[-1][1] > noted[-2][1]:
            for group in optimizer.param_groups:
                group["eps"] *= 10

    training = relight.Training(
        model=model, optimizer=optimizer, data=lambda n: (torch.randn(6, 4), torch.randint(0, 3, (6,)))
    )
    state = trainer.run(training, 17)
    finish(
        job,
        model=model,
        opt=optimizer,
        it=state.iteration,
        alpha=state.alpha,
        metrics=state.metrics,
        noted=noted,
        warm=warm,
    )


if __name__ == "__main__":
    main()
