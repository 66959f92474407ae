"""A trainer class with a dataclass for its state, callbacks with counters of their own, and events by name."""

# ranks: 2
import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


@dataclass
class TrainerState:
    global_step: int = 0
    best_metric: float | None = None
    log_history: list = field(default_factory=list)
    patience_left: int = 3


class Callback:
    def on_step_begin(self, trainer):
        pass

    def on_loss(self, trainer, loss):
        return loss

    def on_step_end(self, trainer, loss):
        pass


class WarmRestart(Callback):
    def __init__(self, period):
        self.period, self.seen = period, 0

    def on_step_begin(self, trainer):
        self.seen += 1
        if self.seen % self.period == 0:
            for group in trainer.optimizer.param_groups:
                group["lr"] = trainer.base_lr
        else:
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 0.9


class Penalty(Callback):
    def __init__(self):
        self.rng = random.Random(5)
        self.np_rng = np.random.default_rng(6)
        self.number = 0

    def on_loss(self, trainer, loss):
        self.number += 1
        weight = self.rng.random() * 0.1 + self.np_rng.random() * 0.1
        return loss + weight * sum(p.square().mean() for p in trainer.model.parameters()) / self.number


class Patience(Callback):
    def on_step_end(self, trainer, loss):
        state = trainer.state
        if state.best_metric is None or loss < state.best_metric:
            state.best_metric, state.patience_left = loss, 3
        else:
            state.patience_left -= 1
            if state.patience_left == 0:
                trainer.model.module.dropout.p *= 0.5
                state.patience_left = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.dropout, self.outer = nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 2)

    def forward(self, x):
        return self.outer(self.dropout(self.inner(x).relu()))


class Trainer:
    def __init__(self, job):
        torch.manual_seed(21)
        self.job, self.base_lr, self.state = job, 0.1, TrainerState()
        self.model = DDP(Net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), self.base_lr, momentum=0.8)
        self.callbacks = [WarmRestart(4), Penalty(), Patience()]
        self.training = relight.Training(model=self.model, optimizer=self.optimizer, data=lambda n: torch.randn(8, 6))

    def fire(self, event, *args):
        return [getattr(callback, event)(self, *args) for callback in self.callbacks]

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self.model(batch), batch[:, :2])
        for callback in self.callbacks:
            loss = callback.on_loss(self, loss)
        self.optimizer.zero_grad()
        loss.backward()
        return loss.detach()

    def fit(self, steps):
        for step in self.training.steps(until=steps):
            with step as batch:
                self.fire("on_step_begin")
                loss = self.training_step(batch)
                mean = loss.clone()
                torch.distributed.all_reduce(mean)
                self.fire("on_step_end", mean.item() / self.job.world_size)
                self.state.global_step += 1
                self.state.log_history.append({"loss": loss.item(), "step": self.state.global_step})
                self.optimizer.step()


def main():
    job = relight.init()
    trainer = Trainer(job)
    trainer.fit(17)
    state = trainer.state
    finish(
        job,
        model=trainer.model,
        optimizer=trainer.optimizer,
        step=state.global_step,
        best=state.best_metric,
        history=[entry["loss"] for entry in state.log_history],
        p=trainer.model.module.dropout.p,
        left=state.patience_left,
    )


if __name__ == "__main__":
    main()
