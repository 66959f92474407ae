"""A model with compile and fit: callbacks get the logs after each batch and epoch, and set model.stop_training, best weights are
restored when patience ends, a History object, a progress bar with a moving width, metrics that are reset."""

# ranks: 2
import copy
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Callback:
    def set_model(self, model):
        self.model = model

    def on_epoch_end(self, epoch, logs=None): ...

    def on_batch_end(self, batch, logs=None): ...


class History(Callback):
    def __init__(self):
        self.epoch, self.history = [], {}

    def on_epoch_end(self, epoch, logs=None):
        self.epoch.append(epoch)
        for k, v in (logs or {}).items():
            self.history.setdefault(k, []).append(v)


class EarlyStopping(Callback):
    def __init__(self, patience, restore_best_weights=True):
        self.patience, self.wait, self.best, self.best_weights = patience, 0, float("inf"), None
        self.restore_best_weights = restore_best_weights

    def on_epoch_end(self, epoch, logs=None):
        current = logs["val_loss"]
        if current < self.best - 0.05:
            self.best, self.wait = current, 0
            self.best_weights = copy.deepcopy(self.model.net.state_dict())
        else:
            self.wait += 1
            if self.wait >= self.patience:
                self.model.stop_training = True
                if self.restore_best_weights:
                    self.model.net.load_state_dict(self.best_weights)


class ReduceLROnPlateau(Callback):
    def __init__(self, factor, patience, cooldown=1):
        self.factor, self.patience, self.cooldown = factor, patience, cooldown
        self.wait, self.cooldown_counter, self.best = 0, 0, float("inf")

    def on_epoch_end(self, epoch, logs=None):
        logs["lr"] = self.model.optimizer.param_groups[0]["lr"]
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if logs["val_loss"] < self.best:
            self.best, self.wait = logs["val_loss"], 0
        elif self.cooldown_counter <= 0:
            self.wait += 1
            if self.wait >= self.patience:
                for g in self.model.optimizer.param_groups:
                    g["lr"] *= self.factor
                self.cooldown_counter, self.wait = self.cooldown, 0


class Progbar:
    def __init__(self, target):
        self.target, self._values, self._start, self._total_width = target, {}, time.time(), 0

    def update(self, current, values):
        for k, v in values:
            total, n = self._values.get(k, (0.0, 0))
            self._values[k] = (total + v, n + 1)
        text = f"{current}/{self.target} " + " - ".join(f"{k}: {a / n:.4f}" for k, (a, n) in self._values.items())
        sys.stdout.write("\b" * self._total_width + "\r" + text)
        self._total_width = len(text)
        sys.stdout.flush()


class Model:
    def __init__(self, net, job):
        self.net, self.job, self.stop_training = net, job, False
        self.ddp = DDP(net)

    def compile(self, optimizer, loss, metrics):
        self.optimizer, self.loss, self.metrics = optimizer, loss, metrics

    def fit(self, x, y, epochs, batch_size, validation_data, callbacks):
        history = History()
        callbacks = [*callbacks, history]
        for c in callbacks:
            c.set_model(self)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size, shuffle=True)
        training = relight.Training(model=self.ddp, optimizer=self.optimizer, data=loader)
        bar, logs = Progbar(len(loader)), {}
        for step in training.steps(until=epochs * len(loader)):
            index = step.number % len(loader)
            with step as (bx, by):
                self.ddp.train()
                out = self.ddp(bx)
                loss = self.loss(out, by)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                values = [("loss", loss.item())] + [(k, f(out, by).item()) for k, f in self.metrics.items()]
                bar.update(index + 1, values)
                for c in callbacks:
                    c.on_batch_end(index, dict(values))
                if index == len(loader) - 1:
                    logs = {k: a / n for k, (a, n) in bar._values.items()}
                    logs["val_loss"] = self.evaluate(*validation_data)
                    for c in callbacks:
                        c.on_epoch_end(step.epoch, logs)
                    bar = Progbar(len(loader))
            if self.stop_training:
                break
        return history

    def evaluate(self, x, y):
        self.net.eval()
        with torch.no_grad():
            return self.loss(self.net(x), y).item()


def accuracy(out, y):
    return (out.argmax(1) == y).float().mean()


job = relight.init()
torch.manual_seed(21)
x, y, xv, yv = torch.randn(32, 5), torch.randint(0, 3, (32,)), torch.randn(16, 5), torch.randint(0, 3, (16,))
model = Model(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)), job)
model.compile(optim.NAdam(model.net.parameters(), lr=0.08), nn.CrossEntropyLoss(), {"acc": accuracy})
stopping, plateau = EarlyStopping(3), ReduceLROnPlateau(0.5, 1)
history = model.fit(x, y, 8, 8, (xv, yv), [stopping, plateau])
finish(
    job, net=model.net, opt=model.optimizer, best=stopping.best, wait=[stopping.wait, plateau.wait, plateau.cooldown_counter],
    epochs=history.epoch, val=history.history["val_loss"],
)  # fmt: skip
