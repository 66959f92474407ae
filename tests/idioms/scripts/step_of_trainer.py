"""A trainer keeps the step under way and the one before, as attributes and in a dictionary beside what steps change."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Trainer:
    def __init__(self):
        self.job = relight.init()
        torch.manual_seed(307)
        self.model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.training = relight.Training(
            model=self.model, optimizer=self.optimizer, data=lambda number: torch.randn(6, 5)
        )
        self.step = self.before = None
        self.context = {"step": None, "mean": 1.0, "seen": []}

    def training_step(self, batch):
        scale = 1.0 if self.before is None or not self.before.committed else 1 / (1 + self.before.number)
        loss = self.model(batch).square().mean() * scale / self.context["mean"]
        self.optimizer.zero_grad()
        loss.backward()
        self.context["mean"] = 0.9 * self.context["mean"] + 0.1 * (1 + loss.item())
        self.context["seen"].append(self.context["step"].number)
        self.optimizer.step()

    def fit(self):
        for step in self.training.steps(until=14):
            self.before, self.step = self.step, step
            self.context["step"] = step
            with step as batch:
                self.training_step(batch)
        last = (self.step.number, self.before.number, self.before.committed, self.context["step"].number)
        finish(self.job, model=self.model, optimizer=self.optimizer, last=last, seen=self.context["seen"])


if __name__ == "__main__":
    Trainer().fit()
