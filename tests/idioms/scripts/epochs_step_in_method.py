"""A loop of epochs, one of steps and the block in three methods, which give the epoch and a scale to each other."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class Runner:
    def __init__(self):
        torch.manual_seed(29)
        self.model = DDP(nn.Linear(6, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.training = relight.Training(
            model=self.model, optimizer=self.optimizer, data=lambda number: torch.randn(8, 6)
        )
        self.history = []

    def train_step(self, step, epoch, scale):
        with step as x:
            loss = (self.model(x) - x.sum(1, keepdim=True)).pow(2).mean() * (1 + epoch * scale)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.history.append((epoch, step.number))

    def run_epoch(self, epoch, *, scale):
        self.model.train()
        for step in self.training.steps():
            self.train_step(step, epoch, scale)

    def fit(self, epochs=4):
        for e in self.training.epochs(epochs, steps_per_epoch=5):
            self.run_epoch(e, scale=0.1 + 0.1 * e)


def main():
    job = relight.init()
    runner = Runner()
    runner.fit()
    finish(job, model=runner.model, optimizer=runner.optimizer, history=runner.history)


if __name__ == "__main__":
    main()
