"""A loop of one rank that times the four parts of its step: under relight, or with ``--plain`` under torchrun.

The parts: entering the block, forward and backward, the optimizer's step (before which relight has its barrier), and
leaving the block until the next one is offered. Prints one line of JSON: the median processor time of the main thread
in each, in microseconds, after a quarter of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import relight

WIDTH, BATCH = 32, 8
PARTS = ("enter", "forward and backward", "optimizer", "leave")


class Clock:
    """Processor time of the main thread, at each mark."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(time.thread_time())

    def medians_us(self) -> dict[str, float]:
        """Return medians of the time from each mark to the next, by the parts of a step."""
        steps = torch.tensor(self._marks, dtype=torch.float64).view(-1, len(PARTS))
        flat = steps[len(steps) // 4 :].flatten()
        spans = (flat[1:] - flat[:-1])[: -len(PARTS) + 1].view(-1, len(PARTS)).median(0).values * 1e6
        return {part: round(float(us), 1) for part, us in zip(PARTS, spans, strict=True)}


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.plain:
        dist.init_process_group("gloo")
    else:
        relight.init()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(options.layers))))
    optimizer = (
        torch.optim.AdamW(model.parameters()) if options.adam else torch.optim.SGD(model.parameters(), 0.01, 0.9)
    )
    clock, values, meter = Clock(), torch.randn(BATCH, WIDTH), {"loss": 0.0, "steps": 0}
    if options.plain:
        _loop((contextlib.nullcontext() for _ in range(options.steps)), model, optimizer, values, meter, clock)
    else:
        training = relight.Training(model=model, optimizer=optimizer)
        training.carry(ignore=("clock",))
        _loop(training.steps(until=options.steps), model, optimizer, values, meter, clock)
    print(json.dumps({"parts": clock.medians_us()}), flush=True)


def _loop(
    steps: Iterable[AbstractContextManager[Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    values: torch.Tensor,
    meter: dict[str, float],
    clock: Clock,
) -> None:
    for step in steps:
        clock.mark()
        with step:
            clock.mark()
            optimizer.zero_grad()
            loss = model(values).square().mean()
            loss.backward()
            clock.mark()
            optimizer.step()
            clock.mark()
            meter["loss"] += loss.item()
            meter["steps"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of a step, for relight or (--plain) torchrun")
    parser.add_argument("--layers", type=int, required=True, help="linear layers, of two tensors each")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--adam", action="store_true", help="AdamW instead of SGD with momentum")
    parser.add_argument("--plain", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
