"""What relight costs while nothing fails: the same loop under relight and under torchrun, step against step.

Both jobs are alive at the same time and take turns, a block of steps each, in the order A B B A: a machine that gets
slower for a minute gets slower for both. Each pair of neighbouring blocks gives one ratio. A process keeps for its life
what luck it had with its memory's pages, a per cent of its speed or more: so both jobs are started several times, each
first in its turn, and the median of the launches' medians counts, with a 95 % confidence interval (bootstrap).

Two controls: torchrun beside torchrun shows what this machine makes of no difference at all; torchrun with one
all-reduce of two numbers in front of the optimizer shows what a barrier through gloo costs, before a line of relight
has run.

Controller, agent and launcher run beside both jobs' blocks, so the ratios do not contain them. Their processor time
is measured by itself and added, as if the training used every core all the time.

Run by ``python -m benchmarks.overhead``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.documents import (
    RESULTS,
    Document,
    Progress,
    Verdict,
    add_verdicts,
    command,
    measure_apart,
    start_document,
    verdict_rows,
    write_document,
)
from benchmarks.figures import Series, groups_interval, markdown_table, median_of_groups, milliseconds, plot
from benchmarks.jobs import CONTROL_PLANE, START_DEADLINE_S, PlainJob, RelightJob
from benchmarks.recovery.peers import JobFailed, trial_directory

SCRIPT = "benchmarks.gated_ddp"
BLOCK_S = 0.5
MIN_STEPS, MAX_STEPS = 2, 100  # in a block
CALIBRATION_STEPS = 6
MIN_PAIRS = 6
BUDGET_S = 16.0  # of blocks for one size; more where a step is long, since fewer fit and the target lies there
LONG_STEP_MS = 100
LONG_FACTOR = 2.0
LAUNCHES = 4  # of both jobs, for one size
SHORT_LAUNCHES = 2  # where steps are short: there is no target, and the difference is large
TARGET_PERCENT = 1.0
REPLY_DEADLINE_S = 60.0

# A step's length on two idle cores with two workers, about, and the model: layers width heads context batch.
SHAPES = {
    5: (2, 64, 2, 32, 2),
    10: (2, 128, 4, 32, 4),
    25: (3, 192, 4, 64, 4),
    50: (4, 256, 4, 64, 4),
    100: (5, 256, 8, 64, 6),
    250: (6, 384, 8, 64, 8),
    500: (6, 512, 8, 64, 10),
}
SIZES = {2: tuple(SHAPES), 4: (10, 50, 100, 250)}  # by number of workers
CONTROL = (2, 100)  # workers, nominal milliseconds
RELIGHT, TORCHRUN, TORCHRUN_WITH_FENCE = "relight", "torchrun", "torchrun with a fence"
VERIFYING = "relight that compares the ranks' state in every step"  # beside relight that does not


@dataclass(frozen=True)
class Block:
    """Some steps of one job."""

    step_s: float  # mean
    cpu_s: float  # per step, all ranks together


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
        return Block(
            step_s=(begun_ns[-1] - begun_ns[0]) / steps / 1e9,
            cpu_s=sum(reply["cpu_s"] for reply in replies) / steps,
        )

    def end(self) -> None:
        """Let the job end by itself."""
        with contextlib.suppress(OSError):
            self._order("end")

    def _order(self, line: str) -> None:
        for link in self._links:
            link.sendall(f"{line}\n".encode())


@contextlib.contextmanager
def two_jobs(
    workers: int, shape: Sequence[int], directory: Path, name: str, *, swapped: bool = False
) -> Iterator[tuple[Side, Side, Any]]:
    """Two jobs at the gate, and the jobs themselves: what `name` says, and what it is compared with.

    `swapped`: the second is started first.
    """
    gate = directory / "gate.sock"
    common = ("--gate", str(gate), "--shape", *map(str, shape))
    first: RelightJob | PlainJob
    second: RelightJob | PlainJob
    folders = [directory / "a", directory / "b"]
    for folder in folders:
        (folder / "events").mkdir(parents=True)
    second = PlainJob(folders[1], SCRIPT, *common, "--name", "b", "--plain", world_size=workers)
    if name == VERIFYING:
        flags = ("--verify-every", "1")
        first = RelightJob(folders[0], SCRIPT, *common, "--name", "a", world_size=workers, standbys=0, flags=flags)
        second = RelightJob(folders[1], SCRIPT, *common, "--name", "b", world_size=workers, standbys=0)
    elif name != RELIGHT:
        fence = ("--fence",) if name == TORCHRUN_WITH_FENCE else ()
        first = PlainJob(folders[0], SCRIPT, *common, "--name", "a", "--plain", *fence, world_size=workers)
    else:
        first = RelightJob(folders[0], SCRIPT, *common, "--name", "a", world_size=workers, standbys=0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(gate))
        listener.listen(4 * workers)
        for job in (second, first) if swapped else (first, second):
            stack.callback(job.stop)
            job.start()
        links = accept(listener, workers, (first, second))
        yield Side(links["a"]), Side(links["b"]), (first, second)


def accept(
    listener: socket.socket, workers: int, jobs: Sequence[RelightJob | PlainJob]
) -> dict[str, dict[int, socket.socket]]:
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


def measure(workers: int, nominal_ms: int, budget_s: float, workdir: Path, name: str = RELIGHT) -> dict[str, Any]:
    """One size."""
    launches = LAUNCHES if nominal_ms >= LONG_STEP_MS else SHORT_LAUNCHES
    found = [
        _launch(workers, nominal_ms, budget_s / launches, workdir, name, swapped=number % 2 == 1)
        for number in range(launches)
    ]
    shares = [statistics.fmean(share) for share in zip(*(shares for _, shares in found), strict=True)]
    return {"workers": workers, "nominal_ms": nominal_ms, "name": name} | figures_of([p for p, _ in found], shares)


def _launch(
    workers: int, nominal_ms: int, budget_s: float, workdir: Path, name: str, *, swapped: bool
) -> tuple[list[tuple[Block, Block]], list[float]]:
    """Both jobs once: pairs of blocks until the time is over, and the processor time of each one's control plane."""
    with (
        trial_directory(workdir) as directory,
        two_jobs(workers, SHAPES[nominal_ms], directory, name, swapped=swapped) as (first, second, jobs),
    ):
        step_s = max(side.run(CALIBRATION_STEPS).step_s for side in (first, second, first, second))
        steps = min(MAX_STEPS, max(MIN_STEPS, round(BLOCK_S / step_s)))
        before = control_plane_cpu_s(jobs)
        started = time.monotonic()
        pairs: list[tuple[Block, Block]] = []
        while len(pairs) < MIN_PAIRS or time.monotonic() < started + budget_s:
            pairs.append(pair_of(first, second, steps, swapped=len(pairs) % 2 == 1))
        wall_s = time.monotonic() - started
        shares = [(now - then) / wall_s for now, then in zip(control_plane_cpu_s(jobs), before, strict=True)]
        first.end()
        second.end()
    return pairs, shares


def pair_of(first: Side, second: Side, steps: int, *, swapped: bool) -> tuple[Block, Block]:
    if swapped:
        later = second.run(steps)
        return first.run(steps), later
    return first.run(steps), second.run(steps)


def figures_of(launches: Sequence[Sequence[tuple[Block, Block]]], shares: Sequence[float]) -> dict[str, Any]:
    pairs = [pair for launch in launches for pair in launch]
    ratios = [[a.step_s / b.step_s for a, b in launch] for launch in launches]
    low, high = groups_interval(ratios)
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
        "added_s": median_of_groups([[a.step_s - b.step_s for a, b in launch] for launch in launches]),
        "cpu_overhead": median_of_groups(cpu) - 1,
        "cpu_interval": [cpu_low - 1, cpu_high - 1],
        "control_plane_cores": [round(share, 5) for share in shares],
        "control_plane_overhead": beside,
        "ratios": [[round(ratio, 5) for ratio in launch] for launch in ratios],
    }


def control_plane_cpu_s(jobs: Sequence[RelightJob | PlainJob]) -> list[float]:
    """Processor time so far of all that is not a worker, for each job."""
    return [sum(_cpu_s(process) for process in _control_plane(job)) for job in jobs]


def _control_plane(job: RelightJob | PlainJob) -> list[psutil.Process]:
    launcher = psutil.Process(job.pid)
    below = [child for child in launcher.children(recursive=True) if set(CONTROL_PLANE.values()) & set(child.cmdline())]
    return [launcher, *below]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------- the whole


def run(sizes: dict[int, Sequence[int]], budget_s: float, workdir: Path, *, with_control: bool) -> Document:
    """Every size, the control, and what the parts of a step cost by themselves."""
    document = start_document("overhead", block_s=BLOCK_S, budget_s=budget_s)
    plan = [(workers, nominal, RELIGHT) for workers, nominals in sizes.items() for nominal in nominals]
    if with_control:
        plan += [(*CONTROL, TORCHRUN), (*CONTROL, TORCHRUN_WITH_FENCE)]
    progress = Progress(len(plan) + 1)
    rows: list[dict[str, Any]] = []
    document["not_measured"] = []
    for workers, nominal_ms, name in plan:
        budget = budget_s * (LONG_FACTOR if nominal_ms >= LONG_STEP_MS else 1.0)
        try:
            rows.append(measure(workers, nominal_ms, budget, workdir, name))
        except (JobFailed, OSError, ValueError) as error:
            document["not_measured"].append(f"{workers} workers, {nominal_ms} ms: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        progress.done(
            f"{name}, {workers} workers, {milliseconds(rows[-1]['plain_step_s'])} steps: {_percent(rows[-1])}"
        )
    document["rows"] = rows
    document["parts"] = measure_apart("step_cost")
    progress.done(f"parts of a step: {document['parts']['own_us']:.0f} us, and the fence")
    document["headline"] = headline(rows)
    add_verdicts(document, [_verdict(row) for row in rows if _is_judged(row)])
    return document


def headline(rows: Sequence[dict[str, Any]]) -> str:
    """The result in a sentence."""
    found = [
        f"{milliseconds(row['plain_step_s'])} {_percent(row)}"
        for row in rows
        if row["workers"] == min(SIZES) and row["name"] == RELIGHT
    ]
    return f"By step time, {min(SIZES)} workers, with 95 % intervals: {'; '.join(found)}."


def _verdict(row: dict[str, Any]) -> Verdict:
    total = (row["overhead"] + row["control_plane_overhead"]) * 100
    low, high = (bound * 100 for bound in row["interval"])
    count = f"{row['pairs']} pairs of {row['launches']} launches"
    note = f"{count}, 95 % interval of the steps alone {low:+.2f} to {high:+.2f} %"
    what = f"overhead at {milliseconds(row['plain_step_s'])} steps, {row['workers']} workers"
    return Verdict(what, total, TARGET_PERCENT, "%", note)


def _is_judged(row: dict[str, Any]) -> bool:
    """The target is for steps of 100 ms and more; a machine a little faster than thought is no way out of it."""
    return bool(row["name"] == RELIGHT) and (
        row["nominal_ms"] >= LONG_STEP_MS or row["plain_step_s"] >= LONG_STEP_MS / 1e3
    )


def _percent(row: dict[str, Any]) -> str:
    return f"{row['overhead'] * 100:+.2f} % [{row['interval'][0] * 100:+.2f}, {row['interval'][1] * 100:+.2f}]"


def render(document: Document) -> str:
    """Markdown."""
    parts = document["parts"]
    header = [
        *("beside torchrun", "workers", "plain step", "overhead, 95 % interval", "added per step", "processor time"),
        *("control plane", "pairs", "medians of launches"),
    ]
    rows = [
        [
            row["name"],
            str(row["workers"]),
            milliseconds(row["plain_step_s"]),
            _percent(row),
            f"{row['added_s'] * 1e6:+.0f} us",
            f"{row['cpu_overhead'] * 100:+.2f} %",
            f"{row['control_plane_overhead'] * 100:+.3f} %",
            str(row["pairs"]),
            ", ".join(f"{(statistics.median(ratios) - 1) * 100:+.1f}" for ratios in row["ratios"]),
        ]
        for row in document["rows"]
    ]
    curve = plot(_series(document["rows"]), x_name="plain step, ms (logarithmic)", y_name="overhead, %")
    return "\n\n".join(
        [
            "relight against plain DDP under torchrun: the same script, both jobs alive, blocks of steps in turns; and "
            "that several times, since a process keeps for its life a luck of its own, which the control shows. Two "
            "controls: torchrun itself, and torchrun with one all-reduce of two numbers in front of the optimizer, "
            "which is what a barrier through gloo costs there. More workers than cores share them, which adds noise. "
            "The control plane's share is that of launcher, controller and agent beyond torchrun's, of all cores.",
            markdown_table(header, rows),
            f"```\n{curve}\n```",
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            "## What a step costs, piece by piece",
            f"One process, {parts['parameters']} parameters in {parts['tensors']} tensors, medians of many calls; the "
            "fence between idle processes, which is the price of knowing that every rank is prepared.",
            _parts_table(parts),
            *(f"Not measured: {text}" for text in document["not_measured"]),
        ]
    )


def _series(rows: Sequence[dict[str, Any]]) -> list[Series]:
    """The curve: one mark for each number of workers, and one for the control."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['workers']} workers" if row["name"] == RELIGHT else "control"
        points.setdefault(name, []).append((row["plain_step_s"] * 1e3, row["overhead"] * 100))
    return [Series(name[0], name, found) for name, found in sorted(points.items(), reverse=True)]


def _parts_table(parts: dict[str, Any]) -> str:
    rows = [[name, f"{value:.1f} us"] for name, value in parts["parts_us"].items()]
    rows.append(["**all of these**", f"{parts['own_us']:.1f} us"])
    rows += [
        [f"fence, {workers} processes, {how}", f"{value:.1f} us"]
        for workers, figures in parts["fence_us"].items()
        for how, value in figures.items()
    ]
    worst = parts["own_us"] + max(max(figures.values()) for figures in parts["fence_us"].values())
    rows += [[f"all, as a share of a step of {step} ms", f"{worst / step / 10:.2f} %"] for step in SHAPES]
    return markdown_table(["piece", "per step"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time of relight beside plain DDP")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of measuring for one size")
    parser.add_argument("--quick", action="store_true", help="few sizes, two workers, no control")
    parser.add_argument("--output", type=Path, default=RESULTS / "overhead.json")
    options = parser.parse_args()
    sizes: dict[int, Sequence[int]] = {2: (10, 100)} if options.quick else dict(SIZES)
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(sizes, options.budget_s, Path(workdir), with_control=not options.quick)
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
