"""A trainer that logs what goes wrong in a batch and raises it again, from itself, in groups, or as one without
words: chains of exceptions that go in circles."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class BatchFailed(Exception):
    def __str__(self):
        return f"batch {self.args[0]} failed: {self.args[1]}"


class Trainer:
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.errors = []

    def forward(self, x):
        try:
            return (self.model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        except Exception as error:
            self.errors.append(str(error))
            raise error from error

    def backward(self, loss):
        try:
            loss.backward()
        except Exception as error:
            failure = RuntimeError(f"backward failed: {error}")
            error.__cause__ = failure
            raise failure from error

    def train_batch(self, x):
        try:
            loss = self.forward(x)
            self.optimizer.zero_grad()
            self.backward(loss)
        except Exception as error:
            if len(self.errors) % 2:
                raise BatchFailed from error
            raise ExceptionGroup("a batch failed", [error]) from error
        self.optimizer.step()


def main():
    job = relight.init()
    torch.manual_seed(36)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = Trainer(model, optimizer)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=18):
        with step as x:
            trainer.train_batch(x)
    finish(job, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
