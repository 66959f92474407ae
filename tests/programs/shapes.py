"""Blocks of many shapes: what they write, when, and what they change besides. Each dies at places that a test names.

`--die PLACE:STEP:RANK`, any number of times: the n-th of these strikes in the job's n-th generation.
"""

import argparse
import copy
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import relight
from tests.programs.train import digest


class Net(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(32, 4)
        self.register_buffer("scale", torch.ones(()))
        self.assigns = self.counts = False
        self.count = 0
        self.recent: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        if self.assigns and self.training:
            self.scale = 0.9 * self.scale + 0.1 * hidden.detach().abs().mean()
        if self.counts:
            self.count += 1
            self.recent.append(float(hidden.detach().mean()))
            self.recent = self.recent[-3:]
            hidden = hidden * (1 + 0.01 * self.count + sum(self.recent))
        logits: torch.Tensor = self.last(self.drop(hidden)) * self.scale
        return logits


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is published: two writes, and an optimizer inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(0.05 * parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["old"]
        self.base_optimizer.step()
        self.zero_grad()


class ByHand:
    """No torch.optim.Optimizer."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.01 * momentum)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"momenta": self.momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for momentum, saved in zip(self.momenta, state["momenta"], strict=True):
            momentum.copy_(saved)


class Run:
    """One job: `block` is the body of its step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.job = relight.init()
        torch.manual_seed(0)
        self.net = Net()
        is_thawing = options.shape == "thawing"
        self.model = DDP(self.net, find_unused_parameters=is_thawing)
        self.net.first.requires_grad_(not is_thawing)
        self.shadow = copy.deepcopy(self.net).requires_grad_(False)
        kind: Any = torch.optim.LBFGS
        makers: dict[str, Callable[[Any], Any]] = {
            "sam": Sam,
            "by-hand": ByHand,
            "lbfgs": lambda p: kind(p, lr=0.1, max_iter=3, history_size=4),
        }
        usual: Callable[[Any], Any] = lambda p: torch.optim.AdamW(p, lr=0.01)  # noqa: E731
        trained = self.net.last if options.shape in ("thawing", "regrouped") else self.model
        self.optimizer = makers.get(options.shape, usual)(trained.parameters())
        self.number = 0
        self.training = relight.Training(
            model={"model": self.model, "shadow": self.shadow}, optimizer=self.optimizer, data=self.batch_of
        )
        if options.checkpoints:
            self.training.checkpoint(options.checkpoints, every=4)

    def batch_of(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * number + self.job.rank)
        return torch.randn(12, 16, generator=generator), torch.randint(0, 4, (12,), generator=generator)

    def die(self, place: str) -> None:
        for index, sentence in enumerate(self.options.die):
            where, step, rank = sentence.split(":")
            is_here = (where, int(step), int(rank)) == (place, self.number, self.job.rank)
            if is_here and self.job.generation == index + 1 and not self.job.is_standby:
                os.kill(os.getpid(), signal.SIGKILL)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), y)

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x, y)
        loss.backward()
        self.die("backward")
        return loss.detach()

    def write(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.die("written")


def plain(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.backward(x, y)
    run.write()


def two_writes(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    plain(run, x, y)
    run.backward(x + 1, y)
    run.die("late")
    run.write()


def lazy(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    (plain if run.number % 4 else two_writes)(run, x, y)


def seldom(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    (two_writes if run.number == 6 else plain)(run, x, y)


def momentum_encoder(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    with torch.no_grad():
        for own, key in zip(run.net.parameters(), run.shadow.parameters(), strict=True):
            key.data = 0.9 * key.data + 0.1 * own.data
        target = run.shadow(x)
    loss = run.loss(x, y) + 0.1 * (target - run.model(x)).square().mean()
    loss.backward()
    run.die("backward")
    run.write()


def decay(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    for parameter in run.net.parameters():
        parameter.data.mul_(0.999)
    plain(run, x, y)


def evaluation(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.model.eval()
    score = run.net(x).argmax(1).eq(y).float().mean()
    run.die("backward")
    dist.all_reduce(score)
    run.model.train()
    run.net.first.requires_grad_(False)
    run.net(x).sum().backward()
    dist.all_reduce(score)
    run.net.first.requires_grad_(True)
    run.optimizer.zero_grad()
    plain(run, x, y)


def assigned(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.net.assigns = run.net.counts = True
    plain(run, x, y)


def late_batchnorm(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.net.norm.train(run.number >= 5)
    plain(run, x, y)


def rates(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = run.backward(x, y)
    work: Any = dist.all_reduce(loss, async_op=True)
    run.write()
    work.wait()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.01 / (1 + float(loss))


def logged(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = run.backward(x, y)
    run.write()
    dist.all_reduce(loss)
    for group in run.optimizer.param_groups:
        group["lr"] *= 1 - 0.001 * float(loss)
    run.die("late")


def statistics_last(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    plain(run, x, y)
    run.net(2 * x)


def average_last(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    plain(run, x, y)
    with torch.no_grad():
        for own, average in zip(run.net.parameters(), run.shadow.parameters(), strict=True):
            average.data.mul_(0.9).add_(own.data, alpha=0.1)
        for buffer, mean in zip(run.net.buffers(), run.shadow.buffers(), strict=True):
            mean.mul_(0.9).add_(buffer, alpha=0.1) if buffer.is_floating_point() else mean.copy_(buffer)


def thawing(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    if run.number == 5:
        run.net.first.requires_grad_(True)
        run.optimizer.add_param_group({"params": run.net.first.parameters(), "lr": 0.02})
    plain(run, x, y)


def regrouped(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    groups = run.optimizer.param_groups
    if run.number == 4:
        groups[0]["params"].append(run.net.first.weight)
    if run.number == 5:
        groups[:] = [{**groups[0], "params": [parameter]} for parameter in reversed(groups[0]["params"])]
    if run.number == 7:
        groups.append(groups.pop(0))
    plain(run, x, y)
    run.net.zero_grad()


def sam(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    run.backward(x, y)
    run.optimizer.first_step()
    run.die("written")
    run.loss(x, y).backward()
    run.die("late")
    run.optimizer.second_step()


def lbfgs(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        run.optimizer.zero_grad()
        loss = run.loss(x, y)
        loss.backward()
        calls += 1
        if calls == 2:
            run.die("backward")
        return loss

    run.optimizer.step(closure)
    run.die("written")


SHAPES: dict[str, Callable[[Run, torch.Tensor, torch.Tensor], None]] = {
    "two-writes": two_writes,
    "lazy": lazy,
    "seldom": seldom,
    "momentum-encoder": momentum_encoder,
    "decay": decay,
    "evaluation": evaluation,
    "assigned": assigned,
    "late-batchnorm": late_batchnorm,
    "rates": rates,
    "logged": logged,
    "statistics-last": statistics_last,
    "average-last": average_last,
    "thawing": thawing,
    "regrouped": regrouped,
    "sam": sam,
    "lbfgs": lbfgs,
    "by-hand": plain,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--die", action="append", default=[], metavar="PLACE:STEP:RANK")
    parser.add_argument("--checkpoints", default="", metavar="DIRECTORY")
    parser.add_argument("--save", default="")
    parser.add_argument("--hold", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(options)
    for step in run.training.steps(until=options.steps):
        with step as (x, y):
            run.number = step.number
            SHAPES[options.shape](run, x, y)
            run.die("end")
    if options.save:
        found = {name: digest(module.state_dict()) for name, module in (("model", run.model), ("shadow", run.shadow))}
        kept = run.optimizer.state_dict()
        found["optimizer"] = digest({key: kept[key] for key in kept if key != "state"})
        found["optimizer's state"] = digest(sorted(kept.get("state", {}).items()))  # whichever was used first
        found["attributes"] = digest([run.net.count, run.net.recent])
        with open(f"{options.save}.{run.job.rank}.part", "w") as file:
            json.dump(found, file)
        os.replace(f"{options.save}.{run.job.rank}.part", f"{options.save}.{run.job.rank}")


if __name__ == "__main__":
    main()
