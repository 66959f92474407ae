"""A net with a history that is a list of dicts in a class of its own; the batch size and callbacks read it back."""

# ranks: 2
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class History(list):
    def new_epoch(self):
        self.append({"batches": []})

    def new_batch(self):
        self[-1]["batches"].append({})

    def record(self, attr, value):
        self[-1][attr] = value

    def record_batch(self, attr, value):
        self[-1]["batches"][-1][attr] = value

    def __getitem__(self, i):
        if isinstance(i, tuple):
            rows, key = list.__getitem__(self, i[0]), i[1]
            return [row[key] for row in rows] if isinstance(i[0], slice) else rows[key]
        return list.__getitem__(self, i)


class EpochScoring:
    def __init__(self, name):
        self.name_, self.best_score_ = name, float("inf")

    def on_epoch_end(self, net):
        losses = [row["loss"] for row in net.history[-1, "batches"]]
        score = sum(losses) / len(losses)
        net.history.record(self.name_, score)
        is_best = score < self.best_score_
        net.history.record(self.name_ + "_best", is_best)
        if is_best:
            self.best_score_ = score


class BatchSizeGrowth:
    def on_epoch_end(self, net):
        if len(net.history) > 1 and not net.history[-1, "train_loss_best"]:
            net.take = min(net.take + 2, 12)


class FreezeUnfreeze:
    def __init__(self, at):
        self.at, self.mapped_ = at, []

    def on_epoch_begin(self, net):
        frozen = len(net.history) < self.at
        for name, p in net.module_.named_parameters():
            if name.startswith("module.0"):
                p.requires_grad_(not frozen)
                if name not in self.mapped_:
                    self.mapped_.append(name)


class NeuralNet:
    def __init__(self, module, **kwargs):
        self.module, self.callbacks = module, kwargs.pop("callbacks")
        vars(self).update(kwargs)

    def initialize(self):
        self.history_ = History()
        self.module_ = DDP(self.module, find_unused_parameters=True)
        self.optimizer_ = torch.optim.Adamax(self.module_.parameters(), lr=self.lr)
        self.criterion_ = nn.MSELoss()
        return self

    @property
    def history(self):
        return self.history_

    @history.setter
    def history(self, value):
        self.history_ = value

    def notify(self, method_name, **cb_kwargs):
        for cb in self.callbacks:
            getattr(cb, method_name, lambda net: None)(self, **cb_kwargs)

    def train_step(self, X, y):
        self.module_.train()
        self.optimizer_.zero_grad()
        loss = self.criterion_(self.module_(X[: self.take]), y[: self.take])
        loss.backward()
        return loss

    def partial_fit(self, epochs, per_epoch):
        training = relight.Training(
            model=self.module_, optimizer=self.optimizer_, data=lambda n: (torch.randn(12, 4), torch.randn(12, 1))
        )
        for step in training.steps(until=epochs * per_epoch):
            with step as (X, y):
                if step.number % per_epoch == 0:
                    self.history.new_epoch()
                    self.history.record("epoch", len(self.history))
                    self.notify("on_epoch_begin")
                self.history.new_batch()
                loss = self.train_step(X, y)
                self.history.record_batch("loss", loss.item())
                self.history.record_batch("size", self.take)
                if step.number % per_epoch == per_epoch - 1:
                    self.notify("on_epoch_end")
                self.optimizer_.step()
        return self


def main():
    job = relight.init()
    torch.manual_seed(19)
    module = nn.Sequential(nn.Linear(4, 10), nn.ELU(), nn.Linear(10, 1))
    net = NeuralNet(
        module, lr=0.02, take=4, callbacks=[EpochScoring("train_loss"), BatchSizeGrowth(), FreezeUnfreeze(3)]
    )
    net.initialize().partial_fit(6, 3)
    finish(
        job,
        module=net.module_,
        opt=net.optimizer_,
        history=list(net.history),
        take=net.take,
        scores=net.history[:, "train_loss"],
        mapped=net.callbacks[2].mapped_,
    )


if __name__ == "__main__":
    main()
