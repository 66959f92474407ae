"""The cost of something that a job does now and then, measured by the steps of the same job just before and after.

In cycles of fifteen steps: five before, five of which the first begins with it, five after. What the five in the middle
take longer than the mean of the others is its price. They are steps of the same processes, seconds apart; a machine
that gets slower steadily adds to both sides alike. The job is started several times, and the median of the launches'
medians counts, with a 95 % confidence interval (bootstrap).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import groups_interval, median_of_groups
from benchmarks.recovery.peers import trial_directory
from benchmarks.turns import Block, Make, at_gate

LAUNCHES = 4
THIRD = 5  # steps; what is measured must be over within so many
CYCLE = 3 * THIRD
MIN_CYCLES = 4  # of a launch


def measure(
    make: Make, workers: int, workdir: Path, *, budget_s: float, first_step: int, every: int, launches: int = LAUNCHES
) -> dict[str, Any]:
    """The act in the sixth step of each cycle, the first of which begins with `first_step`.

    As a share of `every` steps. `budget_s`: of cycles, in all launches together.
    """
    found = [_launch(make, workers, workdir, budget_s / launches, first_step) for _ in range(launches)]
    return figures_of(found, workers, every)


def _launch(make: Make, workers: int, workdir: Path, budget_s: float, first_step: int) -> list[Block]:
    with trial_directory(workdir) as directory, at_gate({"a": make}, workers, directory) as (sides, _):
        side = sides["a"]
        side.run(first_step)
        started = time.monotonic()
        cycles: list[Block] = []
        while len(cycles) < MIN_CYCLES or time.monotonic() < started + budget_s:
            cycles.append(side.run(CYCLE))
        side.end()
    return cycles


def figures_of(launches: Sequence[Sequence[Block]], workers: int, every: int) -> dict[str, Any]:
    """A row of results."""
    added = [[_added(cycle.steps_s) for cycle in cycles] for cycles in launches]
    shares = [[_added(cycle.steps_s) / (every * _usual(cycle.steps_s)) for cycle in cycles] for cycles in launches]
    low, high = groups_interval(shares)
    cycles = [cycle for launch in launches for cycle in launch]
    return {
        "cycles": len(cycles),
        "launches": len(launches),
        "step_s": round(statistics.median(_usual(cycle.steps_s) for cycle in cycles), 6),
        "overhead": median_of_groups(shares),
        "interval": [low, high],
        "added_s": median_of_groups(added),
        "added_interval_s": list(groups_interval(added)),
        # Of a rank.
        "cpu_added_s": median_of_groups([[_added(c.steps_cpu_s) for c in launch] for launch in launches]) / workers,
        "by_step_s": [
            statistics.median(cycle.steps_s[THIRD + place] - _usual(cycle.steps_s) for cycle in cycles)
            for place in range(THIRD)
        ],
        "by_launch": [round(statistics.median(launch), 5) for launch in shares],
    }


def _usual(steps: Sequence[float]) -> float:
    return statistics.fmean([*steps[:THIRD], *steps[2 * THIRD :]])


def _added(steps: Sequence[float]) -> float:
    return sum(steps[THIRD : 2 * THIRD]) - THIRD * _usual(steps)
