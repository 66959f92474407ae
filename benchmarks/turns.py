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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from benchmarks.figures import groups_interval, median_of_groups
from benchmarks.gated_ddp import RUN
from benchmarks.jobs import CONTROL_PLANE, START_DEADLINE_S, PlainJob, RelightJob
from benchmarks.recovery.peers import JobFailed, tail, trial_directory

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

    steps_s: tuple[float, ...]  # as rank 0 began them
    steps_cpu_s: tuple[float, ...]  # all ranks together

    @property
    def step_s(self) -> float:
        """Mean."""
        return statistics.fmean(self.steps_s)

    @property
    def cpu_s(self) -> float:
        """Mean."""
        return statistics.fmean(self.steps_cpu_s)


class Side:
    """One of the two jobs, as seen from the gate."""

    def __init__(self, links: dict[int, socket.socket], job: Job) -> None:
        self._job = job
        self._links = [links[rank] for rank in sorted(links)]
        self._readers = [link.makefile("r") for link in self._links]

    def run(self, steps: int) -> Block:
        """Have the job take so many steps."""
        return self.run_mixed((RUN,), steps)[RUN]

    def run_mixed(self, kinds: Sequence[str], steps: int) -> dict[str, Block]:
        """Have the job take so many steps, of these kinds again and again."""
        self._order(f"{','.join(kinds)} {steps}")
        replies = [self._reply(reader) for reader in self._readers]
        found: dict[str, Block] = {}
        for kind in set(kinds):
            places = [place for place in range(steps) if kinds[place % len(kinds)] == kind]
            found[kind] = Block(
                steps_s=tuple(replies[0]["steps_ns"][place] / 1e9 for place in places),
                steps_cpu_s=tuple(sum(reply["steps_cpu_s"][place] for reply in replies) for place in places),
            )
        return found

    def end(self) -> None:
        """Let the job end by itself."""
        with contextlib.suppress(OSError):
            self._order("end")

    def _reply(self, reader: TextIO) -> dict[str, Any]:
        """Read what a rank reports of a block. Raises JobFailed, with the end of the job's output, if it has ended."""
        line = reader.readline()
        if not line:
            with contextlib.suppress(JobFailed):
                self._job.await_end(REPLY_DEADLINE_S)  # so that its output tells why
            raise JobFailed(f"a rank left the gate:\n{tail(self._job.output)}")
        return json.loads(line)  # type: ignore[no-any-return]

    def _order(self, line: str) -> None:
        for link in self._links:
            link.sendall(f"{line}\n".encode())


Pairs = list[tuple[Block, Block]]


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
) -> dict[str, Any]:
    """The excess of the first job over the second; `budget_s`: of blocks, in all launches together."""
    pairs, shares = [], []
    for number in range(launches):
        found = _launch(first, second, workers, workdir, budget_s / launches, min_pairs, number % 2 == 1)
        pairs.append(found[0])
        shares.append(found[1])
    ours, others = (statistics.fmean(share) for share in zip(*shares, strict=True))
    return figures_of(pairs) | {
        "control_plane_cores": [round(ours, 5), round(others, 5)],
        # On a machine that computes on all cores, what the control plane takes is lost to the training.
        "control_plane_overhead": (ours - others) / (os.cpu_count() or 1),
    }


def measure_within(
    make: Make, workers: int, workdir: Path, kinds: tuple[str, str], *, budget_s: float, launches: int
) -> dict[str, Any]:
    """The excess of the first kind of step over the second in one job: see `gated_ddp`, ``--both``.

    Single steps take turns here, A B B A: neighbours in time, in the same processes, with the same parameters. The next
    block is B A A B, since a block's first step follows a pause.
    """
    first, second = kinds
    patterns = ((first, second, second, first), (second, first, first, second))
    pairs: list[Pairs] = []
    for _ in range(launches):
        with trial_directory(workdir) as directory, at_gate({"a": make}, workers, directory) as (sides, _):
            side = sides["a"]
            side.run_mixed((RUN,), CALIBRATION_STEPS)
            step_s = side.run_mixed(kinds, len(kinds) * CALIBRATION_STEPS)[second].step_s
            steps = len(patterns[0]) * max(1, round(BLOCK_S / step_s / len(patterns[0])))
            started = time.monotonic()
            found: Pairs = []
            while time.monotonic() < started + budget_s / launches:
                blocks = side.run_mixed(patterns[len(found) % 2], steps)
                found.append((blocks[first], blocks[second]))
            pairs.append(found)
            side.end()
    return figures_of(pairs)


def _launch(
    first: Make,
    second: Make,
    workers: int,
    workdir: Path,
    budget_s: float,
    min_pairs: int,
    swapped: bool,
) -> tuple[Pairs, list[float]]:
    """Both jobs once: pairs of blocks until the time is over, and the processor time of each one's control plane."""
    makes = {"b": second, "a": first} if swapped else {"a": first, "b": second}  # as they are started
    with (
        trial_directory(workdir) as directory,
        at_gate(makes, workers, directory) as (sides, by_name),
    ):
        ours, others, jobs = sides["a"], sides["b"], (by_name["a"], by_name["b"])
        steps = calibrate(ours, others)
        before = _control_plane_cpu_s(jobs)
        started = time.monotonic()
        pairs = _pairs(ours, others, steps, budget_s, min_pairs)
        wall_s = time.monotonic() - started
        shares = [(now - then) / wall_s for now, then in zip(_control_plane_cpu_s(jobs), before, strict=True)]
        ours.end()
        others.end()
    return pairs, shares


@contextlib.contextmanager
def at_gate(
    makes: Mapping[str, Make], workers: int, directory: Path
) -> Iterator[tuple[dict[str, Side], dict[str, Job]]]:
    """Start these jobs, by name, and wait until all are at the gate."""
    gate = directory / "gate.sock"
    jobs = {}
    for name, make in makes.items():
        (directory / name / "events").mkdir(parents=True)
        jobs[name] = make(directory / name, ("--gate", str(gate), "--name", name))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(gate))
        listener.listen(4 * workers)
        for job in jobs.values():
            stack.callback(job.stop)
            job.start()
        links = _accept(listener, workers, jobs)
        yield {name: Side(found, jobs[name]) for name, found in links.items()}, jobs


def _accept(listener: socket.socket, workers: int, jobs: Mapping[str, Job]) -> dict[str, dict[int, socket.socket]]:
    """Wait until every rank of all jobs has come to the gate."""
    links: dict[str, dict[int, socket.socket]] = {name: {} for name in jobs}
    listener.settimeout(1.0)
    end = time.monotonic() + START_DEADLINE_S
    while sum(map(len, links.values())) < len(jobs) * workers:
        if time.monotonic() > end:
            raise JobFailed(f"after {START_DEADLINE_S:.0f} s only {links} were at the gate")
        for job in jobs.values():
            job.supervise()
        with contextlib.suppress(TimeoutError):
            link, _ = listener.accept()
            link.settimeout(REPLY_DEADLINE_S)
            hello = json.loads(link.makefile("r").readline())
            links[hello["name"]][hello["rank"]] = link
    return links


def _pairs(first: Side, second: Side, steps: int, budget_s: float, min_pairs: int) -> Pairs:
    """Blocks in turns until the time is over."""
    started = time.monotonic()
    pairs: Pairs = []
    while len(pairs) < min_pairs or time.monotonic() < started + budget_s:
        pairs.append(_pair_of(first, second, steps, swapped=len(pairs) % 2 == 1))
    return pairs


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


def figures_of(launches: Sequence[Pairs]) -> dict[str, Any]:
    """A row of results."""
    pairs = [pair for launch in launches for pair in launch]
    ratios = [[a.step_s / b.step_s for a, b in launch] for launch in launches]
    low, high = groups_interval(ratios)
    added = [[a.step_s - b.step_s for a, b in launch] for launch in launches]
    cpu = [[a.cpu_s / b.cpu_s for a, b in launch] for launch in launches]
    cpu_low, cpu_high = groups_interval(cpu)
    return {
        "pairs": len(pairs),
        "step_s": round(statistics.median(a.step_s for a, _ in pairs), 6),
        "plain_step_s": round(statistics.median(b.step_s for _, b in pairs), 6),
        "launches": len(launches),
        "overhead": median_of_groups(ratios) - 1,
        "interval": [low - 1, high - 1],
        "added_s": median_of_groups(added),
        "cpu_overhead": median_of_groups(cpu) - 1,
        "cpu_interval": [cpu_low - 1, cpu_high - 1],
        "cpu_added_s": median_of_groups([[a.cpu_s - b.cpu_s for a, b in launch] for launch in launches]),
        "ratios": [[round(ratio, 5) for ratio in launch] for launch in ratios],
    }


def overhead_cell(row: dict[str, Any]) -> str:
    """Overhead with its interval, for a table."""
    return f"{row['overhead'] * 100:+.2f} % [{row['interval'][0] * 100:+.2f}, {row['interval'][1] * 100:+.2f}]"


def launches_cell(row: dict[str, Any]) -> str:
    """The overhead that each launch had by itself, in per cent, for a table."""
    return ", ".join(f"{(statistics.median(ratios) - 1) * 100:+.1f}" for ratios in row["ratios"])


def count_of(row: dict[str, Any]) -> str:
    """Say how much was measured, for a verdict's note."""
    low, high = (bound * 100 for bound in row["interval"])
    count = f"{row['pairs']} pairs of {row['launches']} launches"
    return f"{count}, 95 % interval of the steps alone {low:+.2f} to {high:+.2f} %"
