"""Scripts that carry state from step to step by themselves, in the ways that people do. Nothing is declared."""

import argparse
import json
import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.programs.train import digest

GLOBALS: dict[str, float] = {"scale": 1.0}
calls = 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        out, state = self.cell(x, state)
        return self.head(out), state


class Job:
    """The parts that every shape needs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.job = relight.init()
        torch.manual_seed(0)
        self.model = DDP(Recurrent())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

        def batch_of(number: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(1000 * number + self.job.rank)
            return torch.randn(5, 3, 8, generator=generator)

        self.training = relight.Training(model=self.model, optimizer=self.optimizer, data=batch_of)

    def hold(self, number: int) -> None:
        while number == self.options.hold_at and not os.path.exists(self.options.hold):
            time.sleep(0.01)

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.model(x, None)
        return F.mse_loss(out, x.sum(-1, keepdim=True))


def hidden_state(job: Job) -> Any:
    """Truncated backpropagation through time."""
    hidden = None
    for step in job.training.steps(until=job.options.steps):
        with step as x:
            if hidden is not None:
                hidden = tuple(part.detach() for part in hidden)
            out, hidden = job.model(x, hidden)
            F.mse_loss(out, x.sum(-1, keepdim=True)).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.hold(step.number)
    return hidden


def running_mean(job: Job) -> Any:
    """The loss is scaled by a mean of those before, which is renewed after the write."""
    mean, count, losses = 1.0, 0, []
    for step in job.training.steps(until=job.options.steps):
        with step as x:
            loss = job.loss_of(x) / mean
            loss.backward()
            if count % 3 == 2:
                nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
            job.optimizer.step()
            job.optimizer.zero_grad()
            mean = 0.9 * mean + 0.1 * loss.item()
            count += 1
            losses.append(loss.item())
        job.hold(step.number)
    return mean, count


class Trainer:
    """Keeps a baseline as an attribute, and takes its steps in a method."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.baseline = torch.zeros(())
        self.recent: deque[float] = deque(maxlen=3)
        self.generator = np.random.default_rng(job.job.rank)
        self.torch_generator = torch.Generator().manual_seed(5)
        self.seen = 0

    def train(self) -> Any:
        for step in self.job.training.steps(until=self.job.options.steps):
            self.step(step)
            self.job.hold(step.number)
        return self.baseline, list(self.recent), self.seen

    def step(self, step: Any) -> None:
        with step as x:
            noise = self.generator.normal() + torch.randn((), generator=self.torch_generator)
            loss = self.job.loss_of(x + 0.1 * noise) - self.baseline
            if self.recent:
                loss = loss * (1 + max(self.recent))
            loss.backward()
            self.job.optimizer.step()
            self.job.optimizer.zero_grad()
            self.note(loss.detach())

    def note(self, loss: torch.Tensor) -> None:
        self.baseline.mul_(0.9).add_(0.1 * loss)
        self.recent.append(float(loss))
        self.seen += 1


def counter() -> Callable[[], int]:
    count = 0

    def bump() -> int:
        nonlocal count
        count += 1
        return count

    return bump


def functions(job: Job) -> Any:
    """Globals and closures, a generator of Python's, a buffer of what was seen, changed by functions."""
    bump, draw, replay = counter(), random.Random(job.job.rank), []

    def weigh(loss: torch.Tensor) -> torch.Tensor:
        global calls  # noqa: PLW0603
        calls += 1
        GLOBALS["scale"] = 0.5 * GLOBALS["scale"] + 0.5 / calls
        return loss * GLOBALS["scale"] / bump()

    for step in job.training.steps(until=job.options.steps):
        with step as x:
            replay.append({"x": x, "number": step.number})
            if len(replay) > 4:
                replay.pop(0)
            old = replay[draw.randrange(len(replay))]
            weigh(job.loss_of(x) + job.loss_of(old["x"]) * old["number"]).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.hold(step.number)
    return calls, dict(GLOBALS), bump(), len(replay), draw.random()


def above_the_block(job: Job) -> Any:
    """Counts, draws and makes ready what the block uses before it enters it."""
    count, mean = 0, 1.0
    for step in job.training.steps(until=job.options.steps):
        count += 1
        noise = torch.randn(5, 3, 8) * random.random() * float(np.random.rand())
        scale = 1 / (mean * (step.number + count))
        with step as x:
            loss = job.loss_of(x + noise) * scale
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            mean = 0.9 * mean + 0.1 * loss.item()
        job.hold(step.number)
    return count, mean


def changed_above(job: Job) -> Any:
    """Changes parameters and learning rate before it enters the block, by what they were."""
    for step in job.training.steps(until=job.options.steps):
        for group in job.optimizer.param_groups:
            group["lr"] *= 0.9
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.mul_(0.98)
        with step as x:
            job.loss_of(x).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.hold(step.number)
    return [group["lr"] for group in job.optimizer.param_groups]


def asked_for_in_the_loop(job: Job) -> Any:
    """The loop asks for its next step by itself, and gives it to a function."""
    losses = [1.0]

    def one(step: Any, weight: float) -> None:
        with step as x:
            loss = job.loss_of(x) * weight / losses[-1]
            loss.backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            losses.append(losses[-1] + loss.item())

    steps = iter(job.training.steps(until=job.options.steps))
    while True:
        step = next(steps, None)
        if step is None:
            return losses
        one(step, 1 + 0.1 * len(losses))
        job.hold(step.number)


SHAPES: dict[str, Callable[[Job], Any]] = {
    "hidden-state": hidden_state,
    "running-mean": running_mean,
    "trainer": lambda job: Trainer(job).train(),
    "functions": functions,
    "above": above_the_block,
    "changed-above": changed_above,
    "asked-for": asked_for_in_the_loop,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--hold", default="")
    parser.add_argument("--save", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = Job(options)
    carried = SHAPES[options.shape](job)
    if options.save:
        found = {"parameters": digest(dict(job.model.named_parameters())), "carried": digest(carried)}
        path = f"{options.save}.{job.job.rank}"
        with open(path + ".part", "w") as file:
            json.dump(found, file)
        os.replace(path + ".part", path)


if __name__ == "__main__":
    main()
