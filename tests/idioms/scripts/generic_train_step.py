"""A decorator retries and times the train step; a context manager keeps statistics."""

# ranks: 2
import contextlib
import functools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.idioms.digest import finish


def timed(function):
    stats = {"calls": 0, "values": []}

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        stats["calls"] += 1
        out = function(*args, **kwargs)
        stats["values"].append(float(out))
        wrapper.last = float(out)
        return out

    wrapper.stats = stats
    wrapper.last = 0.0
    return wrapper


class Section(contextlib.ContextDecorator):
    depth = 0

    def __enter__(self):
        type(self).depth += 1
        return self

    def __exit__(self, *details):
        self.entered = getattr(self, "entered", 0) + 1
        return False


SECTION = Section()


@timed
@SECTION
def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :3] * (1 + 0.1 * train_step.last)).square().mean() * (1 + 0.001 * Section.depth)
    loss.backward()
    optimizer.step()
    return loss.detach()


def main():
    job = relight.init()
    torch.manual_seed(43)
    model = DDP(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = relight.Training(model=model, optimizer=optimizer, data=lambda n: torch.randn(6, 5))
    for step in training.steps(until=14):
        with step as x:
            train_step(model, optimizer, x)
    finish(job, model=model, stats=train_step.stats, depth=Section.depth, entered=SECTION.entered)


if __name__ == "__main__":
    main()
