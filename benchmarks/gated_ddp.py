"""A job that takes steps only when told to, so that two jobs can live side by side and take turns.

The same loop under relight, or with ``--plain`` under torchrun. Every rank connects to the gate, a Unix socket of
the measuring process, and then obeys lines: ``run N`` (take N steps, then report how long each took and what it cost)
and ``end``. Between two blocks of steps a job waits for its next line and costs nothing.

With ``--both`` a job under relight can also take plain steps: of the same model, by another DistributedDataParallel
over a gloo group of its own, outside relight's steps and with relight's hooks removed. There are two such, ``plain``
and ``twin``, so that plain steps can be compared with plain ones. What stays in them is the empty lists of hooks where
gates were: torch cannot take those away. ``run,plain,plain,run 8`` takes eight steps, of these kinds again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import relight
from benchmarks.recovery.workload import Shape, batch, build_model, build_optimizer, loss_of
from relight.training.torch_private.distributed.groups import make_generation_group

ENDLESS = 10**9
RUN, PLAIN, TWIN = "run", "plain", "twin"  # kinds of steps


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Steps on demand, for relight or (--plain) torchrun")
    parser.add_argument("--gate", type=Path, required=True, help="Unix socket of the measuring process")
    parser.add_argument("--name", required=True, help="of this job, for the measuring process")
    parser.add_argument("--shape", type=int, nargs=5, required=True, help="layers width heads context batch")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--both", type=Path, metavar="FILE", help="plain steps as well; ranks meet through this file")
    parser.add_argument("--fence", action="store_true", help="with --plain: an all-reduce in front of the optimizer")
    return parser.parse_args()


class Gate:
    """Lets the loop pass, or holds it until the measuring process wants more steps."""

    def __init__(self, path: Path, name: str, rank: int, prepare: Callable[[str], None] | None = None) -> None:
        """`prepare` is called in front of each step with its kind, outside what is measured."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("r")
        self._send({"name": name, "rank": rank})
        self._prepare = prepare
        self._kinds: list[str] = []  # of the steps that are left, the next one last
        self.kind = ""  # of the step that begins
        self._begun: tuple[int, float] | None = None
        self._steps_ns: list[int] = []
        self._steps_cpu_s: list[float] = []

    def passes(self) -> bool:
        """Called in front of each step; false once there shall be no more."""
        now_ns, cpu_s = time.monotonic_ns(), _cpu_s()
        if self._begun is not None:
            self._steps_ns.append(now_ns - self._begun[0])
            self._steps_cpu_s.append(cpu_s - self._begun[1])
        if not self._kinds and not self._obey():
            return False
        self.kind = self._kinds.pop()
        if self._prepare is not None:
            self._prepare(self.kind)
        self._begun = time.monotonic_ns(), _cpu_s()
        return True

    def _obey(self) -> bool:
        """Report the steps of a block, and wait for the next one. False: there shall be none."""
        if self._begun is not None:
            self._send({"steps_ns": self._steps_ns, "steps_cpu_s": self._steps_cpu_s})
        order, _, count = self._lines.readline().partition(" ")
        kinds = order.strip().split(",")
        if not {RUN, PLAIN, TWIN}.issuperset(kinds):
            return False
        self._kinds = [kinds[number % len(kinds)] for number in reversed(range(int(count)))]
        self._steps_ns, self._steps_cpu_s = [], []
        return True

    def _send(self, message: object) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def _cpu_s() -> float:
    """Processor time of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def take_step(
    protection: AbstractContextManager[object],
    model: nn.Module,
    optimizer: Optimizer,
    shape: Shape,
    number: int,
    rank: int,
    *,
    fence: bool = False,
) -> None:
    """One step; `protection` is relight's, or nothing."""
    with protection:
        optimizer.zero_grad()
        loss_of(model, *batch(0, number, rank, shape)).backward()
        if fence:
            dist.all_reduce(torch.zeros(2, dtype=torch.int64))
        optimizer.step()


def train_plain(options: argparse.Namespace, shape: Shape) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(build_model(0, shape))
    optimizer = build_optimizer(model)
    gate = Gate(options.gate, options.name, rank)
    number = 0
    while gate.passes():
        take_step(contextlib.nullcontext(), model, optimizer, shape, number, rank, fence=options.fence)
        number += 1


def train_with_relight(options: argparse.Namespace, shape: Shape) -> None:
    job = relight.init()
    net = build_model(0, shape)
    model = DistributedDataParallel(net)
    plain = {kind: _twin(net, options.both, kind, job) for kind in (PLAIN, TWIN)} if options.both else {}
    optimizer = build_optimizer(model)
    training = relight.Training(model=model, optimizer=optimizer)
    training.carry(ignore=("gate",))  # its socket and its figures belong to the measuring process
    gate = Gate(options.gate, options.name, job.rank, Hooks(training).needed_by)
    for step in training.steps(until=ENDLESS):
        while (passes := gate.passes()) and gate.kind in plain:
            take_step(contextlib.nullcontext(), plain[gate.kind], optimizer, shape, step.number, job.rank)
        if not passes:
            break
        take_step(step, model, optimizer, shape, step.number, job.rank)


def _twin(net: nn.Module, meeting: Path, kind: str, job: relight.Job) -> nn.Module:
    """Wrap the same parameters, with gradients reduced as without relight. Whichever is called forward reduces them."""
    store = dist.FileStore(f"{meeting}-{kind}", job.world_size)  # type: ignore[attr-defined]
    group = make_generation_group(store, job.rank, job.world_size, kind, None)
    return DistributedDataParallel(net, process_group=group)


class Hooks:
    """Takes relight's hooks out of plain steps, and puts them back."""

    def __init__(self, training: relight.Training) -> None:
        self._training = training
        self._are_there = True

    def needed_by(self, kind: str) -> None:
        """A step of this kind follows."""
        parts = self._training._parts
        phases, writes = parts.phases, parts.writes
        if self._are_there and kind != RUN:
            phases.remove()
            writes.remove()
        elif not self._are_there and kind == RUN:
            writes.install()
            phases.install()
        self._are_there = kind == RUN


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    train = train_plain if options.plain else train_with_relight
    train(options, Shape(*options.shape))


if __name__ == "__main__":
    main()
