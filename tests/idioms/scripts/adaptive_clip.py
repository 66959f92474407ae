"""Clipping by a multiple of the running norm of earlier gradients (a deque on the trainer), with a skipped update when the
norm is an outlier: some steps write nothing."""

from collections import deque

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


class AutoClipper:
    def __init__(self, window=6, factor=1.2):
        self.history = deque(maxlen=window)
        self.factor = factor

    def __call__(self, parameters):
        parameters = list(parameters)
        norm = torch.stack([p.grad.norm() for p in parameters]).norm().item()
        bound = self.factor * sum(self.history) / len(self.history) if self.history else norm
        self.history.append(norm)
        nn.utils.clip_grad_norm_(parameters, bound)
        return norm < 2.5 * bound

    def state_dict(self):
        return {"history": list(self.history)}

    def load_state_dict(self, state):
        self.history.clear()
        self.history.extend(state["history"])


def main():
    job = relight.init()
    torch.manual_seed(35)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    clipper = AutoClipper()
    training = relight.Training(model=model, optimizer=optimizer, clipper=clipper, data=lambda n: torch.randn(8, 6))
    for step in training.steps(until=18):
        with step as x:
            scale = 30.0 if step.number % 7 == 6 else 1.0
            loss = scale * (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            if clipper(model.parameters()):
                optimizer.step()
    finish(job, model=model, optimizer=optimizer, clipper=clipper)


if __name__ == "__main__":
    main()
