"""Two jobs that live side by side and take turns: what steps cost in one of them beside those in the other.

A block of steps each, in the order A B B A: a machine that gets slower for a minute gets slower for both. Each pair of
neighbouring blocks gives one ratio. A process keeps for its life what luck it had with its memory's pages, a per cent
of its speed or more: so both jobs are started several times, each first in its turn, and the median of the launches'
medians counts, with a 95 % confidence interval (bootstrap).

Launcher, controller and agent run beside both jobs' blocks, so the ratios do not contain them. Their processor time is
measured by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import groups_interval, median_of_groups
from benchmarks.jobs import CONTROL_PLANE, START_DEADLINE_S, PlainJob, RelightJob
from benchmarks.recovery.peers import JobFailed, trial_directory

LAUNCHES = 4  # of both jobs
MIN_PAIRS = 6  # of a launch
BLOCK_S = 0.5
MIN_STEPS, MAX_STEPS = 2, 100  # in a block
CALIBRATION_STEPS = 6
REPLY_DEADLINE_S = 60.0

Job = RelightJob | PlainJob
# Makes a job that is not started yet: in this directory, with these arguments for its script to find the gate.
Make = Callable[[Path, tuple[str, ...]], Job]


@dataclass(frozen=True)
class Block:
    """Some steps of one job."""

    step_s: float  # mean
    cpu_s: float  # per step, all ranks together
    later_s: float  # all of the second half of the steps, over the first half


class Side:
    """One of the two jobs, as seen from the gate."""

    def __init__(self, links: dict[int, socket.socket]) -> None:
        self._links = [links[rank] for rank in sorted(links)]
        self._readers = [link.makefile("r") for link in self._links]

    def run(self, steps: int) -> Block:
        """Have the job take so many steps."""
        self._order(f"run {steps}")
        replies = [json.loads(reader.readline()) for reader in self._readers]
        begun_ns = replies[0]["begun_ns"]
        half = steps // 2
        later_ns = (begun_ns[2 * half] - begun_ns[half]) - (begun_ns[half] - begun_ns[0])
        return Block(
            step_s=(begun_ns[-1] - begun_ns[0]) / steps / 1e9,
            cpu_s=sum(reply["cpu_s"] for reply in replies) / steps,
            later_s=later_ns / 1e9,
        )

    def end(self) -> None:
        """Let the job end by itself."""
        with contextlib.suppress(OSError):
            self._order("end")

    def _order(self, line: str) -> None:
        for link in self._links:
            link.sendall(f"{line}\n".encode())


Pairs = list[tuple[Block, Block]]
# Warms both jobs up; returns how many steps a block shall have.
WarmUp = Callable[[Side, Side], int]


def calibrate(first: Side, second: Side) -> int:
    """So many steps as take about BLOCK_S."""
    step_s = max(side.run(CALIBRATION_STEPS).step_s for side in (first, second, first, second))
    return min(MAX_STEPS, max(MIN_STEPS, round(BLOCK_S / step_s)))


def measure(
    first: Make,
    second: Make,
    workers: int,
    workdir: Path,
    *,
    budget_s: float,
    launches: int = LAUNCHES,
    min_pairs: int = MIN_PAIRS,
    warm_up: WarmUp = calibrate,
) -> dict[str, Any]:
    """What the first job takes longer than the second; `budget_s`: of blocks, in all launches together."""
    pairs, shares = [], []
    for number in range(launches):
        found = _launch(first, second, workers, workdir, budget_s / launches, min_pairs, warm_up, number % 2 == 1)
        pairs.append(found[0])
        shares.append(found[1])
    return figures_of(pairs, [statistics.fmean(share) for share in zip(*shares, strict=True)])


def _launch(
    first: Make,
    second: Make,
    workers: int,
    workdir: Path,
    budget_s: float,
    min_pairs: int,
    warm_up: WarmUp,
    swapped: bool,
) -> tuple[Pairs, list[float]]:
    """Both jobs once: pairs of blocks until the time is over, and the processor time of each one's control plane."""
    with (
        trial_directory(workdir) as directory,
        _two_jobs(first, second, workers, directory, swapped) as (ours, others, jobs),
    ):
        steps = warm_up(ours, others)
        before = _control_plane_cpu_s(jobs)
        started = time.monotonic()
        pairs: Pairs = []
        while len(pairs) < min_pairs or time.monotonic() < started + budget_s:
            pairs.append(_pair_of(ours, others, steps, swapped=len(pairs) % 2 == 1))
        wall_s = time.monotonic() - started
        shares = [(now - then) / wall_s for now, then in zip(_control_plane_cpu_s(jobs), before, strict=True)]
        ours.end()
        others.end()
    return pairs, shares


@contextlib.contextmanager
def _two_jobs(
    first: Make, second: Make, workers: int, directory: Path, swapped: bool
) -> Iterator[tuple[Side, Side, tuple[Job, Job]]]:
    """Both at the gate. `swapped`: the second is started first."""
    gate = directory / "gate.sock"
    folders = [directory / "a", directory / "b"]
    for folder in folders:
        (folder / "events").mkdir(parents=True)
    jobs = (
        first(folders[0], ("--gate", str(gate), "--name", "a")),
        second(folders[1], ("--gate", str(gate), "--name", "b")),
    )
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(gate))
        listener.listen(4 * workers)
        for job in reversed(jobs) if swapped else jobs:
            stack.callback(job.stop)
            job.start()
        links = _accept(listener, workers, jobs)
        yield Side(links["a"]), Side(links["b"]), jobs


def _accept(listener: socket.socket, workers: int, jobs: Sequence[Job]) -> dict[str, dict[int, socket.socket]]:
    """Wait until every rank of both jobs has come to the gate."""
    links: dict[str, dict[int, socket.socket]] = {"a": {}, "b": {}}
    listener.settimeout(1.0)
    end = time.monotonic() + START_DEADLINE_S
    while sum(map(len, links.values())) < 2 * workers:
        if time.monotonic() > end:
            raise JobFailed(f"after {START_DEADLINE_S:.0f} s only {links} were at the gate")
        for job in jobs:
            job.supervise()
        with contextlib.suppress(TimeoutError):
            link, _ = listener.accept()
            link.settimeout(REPLY_DEADLINE_S)
            hello = json.loads(link.makefile("r").readline())
            links[hello["name"]][hello["rank"]] = link
    return links


def _pair_of(first: Side, second: Side, steps: int, *, swapped: bool) -> tuple[Block, Block]:
    if swapped:
        later = second.run(steps)
        return first.run(steps), later
    return first.run(steps), second.run(steps)


def _control_plane_cpu_s(jobs: Sequence[Job]) -> list[float]:
    """Processor time so far of all that is not a worker, for each job."""
    return [sum(_cpu_s(process) for process in _control_plane(job)) for job in jobs]


def _control_plane(job: Job) -> list[psutil.Process]:
    launcher = psutil.Process(job.pid)
    below = [child for child in launcher.children(recursive=True) if set(CONTROL_PLANE.values()) & set(child.cmdline())]
    return [launcher, *below]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------- figures


def figures_of(launches: Sequence[Pairs], shares: Sequence[float]) -> dict[str, Any]:
    """A row of results; `shares`: of a core, of the two control planes."""
    pairs = [pair for launch in launches for pair in launch]
    ratios = [[a.step_s / b.step_s for a, b in launch] for launch in launches]
    low, high = groups_interval(ratios)
    added = [[a.step_s - b.step_s for a, b in launch] for launch in launches]
    later = [[a.later_s - b.later_s for a, b in launch] for launch in launches]
    later_low, later_high = groups_interval(later)
    cpu = [[a.cpu_s / b.cpu_s for a, b in launch] for launch in launches]
    cpu_low, cpu_high = groups_interval(cpu)
    # On a machine that computes on all cores, what the control plane takes is lost to the training.
    beside = (shares[0] - shares[1]) / (os.cpu_count() or 1)
    return {
        "pairs": len(pairs),
        "step_s": round(statistics.median(a.step_s for a, _ in pairs), 6),
        "plain_step_s": round(statistics.median(b.step_s for _, b in pairs), 6),
        "launches": len(launches),
        "overhead": median_of_groups(ratios) - 1,
        "interval": [low - 1, high - 1],
        "added_s": median_of_groups(added),
        "later_s": median_of_groups(later),
        "later_interval_s": [later_low, later_high],
        "cpu_overhead": median_of_groups(cpu) - 1,
        "cpu_interval": [cpu_low - 1, cpu_high - 1],
        "cpu_added_s": median_of_groups([[a.cpu_s - b.cpu_s for a, b in launch] for launch in launches]),
        "control_plane_cores": [round(share, 5) for share in shares],
        "control_plane_overhead": beside,
        "ratios": [[round(ratio, 5) for ratio in launch] for launch in ratios],
    }


def overhead_cell(row: dict[str, Any]) -> str:
    """Overhead with its interval, for a table."""
    return f"{row['overhead'] * 100:+.2f} % [{row['interval'][0] * 100:+.2f}, {row['interval'][1] * 100:+.2f}]"


def launches_cell(row: dict[str, Any]) -> str:
    """The overhead that each launch had by itself, in per cent, for a table."""
    return ", ".join(f"{(statistics.median(ratios) - 1) * 100:+.1f}" for ratios in row["ratios"])


def count_of(row: dict[str, Any]) -> str:
    """How much was measured, for a verdict's note."""
    low, high = (bound * 100 for bound in row["interval"])
    count = f"{row['pairs']} pairs of {row['launches']} launches"
    return f"{count}, 95 % interval of the steps alone {low:+.2f} to {high:+.2f} %"
