"""The cost of relight while nothing fails: the same loop under relight and under torchrun, step against step.

Both jobs are alive at the same time and take turns, and both are started several times: see `turns`. Processes differ
by more than what is looked for. So there is a second comparison, within one job under relight: its steps, and plain
ones of the same model in the same processes, without relight's hooks, step by step in turns. It leaves out the
processes beside the workers only.

Controls: torchrun beside torchrun, and plain steps beside plain ones in the same processes, show what this machine
makes of no difference at all; torchrun with one all-reduce of two numbers in front of the optimizer shows what a
barrier through gloo costs, before a line of relight has run.

What the control plane takes is measured by itself and added, as if the training used every core all the time.

Run by ``python -m benchmarks.overhead``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import turns
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
from benchmarks.figures import Series, markdown_table, milliseconds, plot
from benchmarks.gated_ddp import PLAIN, RUN, TWIN
from benchmarks.jobs import PlainJob, RelightJob
from benchmarks.recovery.peers import JobFailed
from benchmarks.turns import Make, count_of, launches_cell, overhead_cell

SCRIPT = "benchmarks.gated_ddp"
BUDGET_S = 16.0  # of blocks for one size; more where a step is long, since fewer fit and the target lies there
LONG_STEP_MS = 100
LONG_NOMINAL_MS = 50  # what may take so long on a slower machine
LONG_FACTOR = 10.0
LONG_LAUNCHES = 10  # of both jobs: each has a luck of its own, of a per cent or two, as large as what is looked for
SHORT_LAUNCHES = 2  # where steps are short: there is no target, and the difference is large
WITHIN_FACTOR = 1.2  # of the long ones' budget: with the luck of processes out of the way, it pays
WITHIN_LAUNCHES = 2
# Sizes that may take just as long as the target begins with, where what relight costs is the largest share: to tell
# less than a per cent from more takes longer there.
EDGE = ((2, 50), (2, 100))  # workers, nominal milliseconds
EDGE_FACTOR = 3.0
EDGE_LAUNCHES = 4
TARGET_PERCENT = 1.0

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
SIZES = {2: tuple(SHAPES), 4: (10, 50, 100)}  # by number of workers
CONTROL = (2, 100)  # workers, nominal milliseconds
RELIGHT, TORCHRUN, TORCHRUN_WITH_FENCE = "relight", "torchrun", "torchrun with a fence"


def relight(workers: int, nominal_ms: int, *flags: str, both: bool = False) -> Make:
    """The loop under `relight run` with these flags, in a shape of SHAPES. `both`: it can take plain steps, too."""
    shape = ("--shape", *map(str, SHAPES[nominal_ms]))

    def make(directory: Path, to_gate: tuple[str, ...]) -> RelightJob:
        twin = ("--both", str(directory / "meeting")) if both else ()
        return RelightJob(directory, SCRIPT, *to_gate, *shape, *twin, world_size=workers, standbys=0, flags=flags)

    return make


def torchrun(workers: int, nominal_ms: int, *arguments: str) -> Make:
    """Make the job under torchrun."""
    shape = ("--shape", *map(str, SHAPES[nominal_ms]))

    def make(directory: Path, to_gate: tuple[str, ...]) -> PlainJob:
        return PlainJob(directory, SCRIPT, *to_gate, *shape, "--plain", *arguments, world_size=workers)

    return make


def _is_long(workers: int, nominal_ms: int) -> bool:
    """Return whether steps take as long as those that the target is for; more workers than cores share them."""
    return nominal_ms * max(1, workers // 2) >= LONG_NOMINAL_MS


def _within(workers: int, nominal_ms: int, name: str) -> tuple[float, int]:
    """For the comparison within one job: how many times a size's budget it takes, and how often it is started."""
    if name == RELIGHT and (workers, nominal_ms) in EDGE:
        return EDGE_FACTOR, EDGE_LAUNCHES
    return (WITHIN_FACTOR if _is_long(workers, nominal_ms) else 1.0), WITHIN_LAUNCHES


def measure(workers: int, nominal_ms: int, budget_s: float, workdir: Path, name: str) -> dict[str, Any]:
    """One size: what `name` says, beside torchrun."""
    plain = torchrun(workers, nominal_ms)
    first = {
        RELIGHT: relight(workers, nominal_ms),
        TORCHRUN: plain,
        TORCHRUN_WITH_FENCE: torchrun(workers, nominal_ms, "--fence"),
    }[name]
    launches = LONG_LAUNCHES if _is_long(workers, nominal_ms) else SHORT_LAUNCHES
    found = turns.measure(first, plain, workers, workdir, budget_s=budget_s, launches=launches)
    kinds = {RELIGHT: (RUN, PLAIN), TORCHRUN: (TWIN, PLAIN)}.get(name)
    if kinds is not None:
        both = relight(workers, nominal_ms, both=True)
        factor, launches = _within(workers, nominal_ms, name)
        found["within"] = turns.measure_within(
            both, workers, workdir, kinds, budget_s=budget_s * factor, launches=launches
        )
    return {"workers": workers, "nominal_ms": nominal_ms, "name": name} | found


# ---------------------------------------------------------------- the whole


def run(sizes: dict[int, Sequence[int]], budget_s: float, workdir: Path, *, with_control: bool) -> Document:
    """Every size, the control, and what the parts of a step cost by themselves."""
    document = start_document("overhead", block_s=turns.BLOCK_S, budget_s=budget_s)
    plan = [(workers, nominal, RELIGHT) for workers, nominals in sizes.items() for nominal in nominals]
    if with_control:
        plan += [(*CONTROL, TORCHRUN), (*CONTROL, TORCHRUN_WITH_FENCE)]
    progress = Progress(len(plan) + 1)
    rows: list[dict[str, Any]] = []
    document["not_measured"] = []
    for workers, nominal_ms, name in plan:
        budget = budget_s * (LONG_FACTOR if _is_long(workers, nominal_ms) else 1.0)
        try:
            rows.append(measure(workers, nominal_ms, budget, workdir, name))
        except (JobFailed, OSError, ValueError) as error:
            document["not_measured"].append(f"{workers} workers, {nominal_ms} ms: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        progress.done(
            f"{name}, {workers} workers, {milliseconds(rows[-1]['plain_step_s'])} steps: {overhead_cell(rows[-1])}"
        )
    document["rows"] = rows
    document["parts"] = measure_apart("step_cost")
    progress.done(f"parts of a step: {document['parts']['own_us']:.0f} us, and the fence")
    document["headline"] = headline(rows)
    add_verdicts(document, [verdict for row in rows if _is_judged(row) for verdict in _verdicts(row)])
    return document


def headline(rows: Sequence[dict[str, Any]]) -> str:
    """The result in a sentence."""
    found = [
        f"{milliseconds(row['plain_step_s'])} {overhead_cell(row['within'])}"
        for row in rows
        if row["workers"] == min(SIZES) and row["name"] == RELIGHT
    ]
    return f"By step time, {min(SIZES)} workers, in the same processes, with 95 % intervals: {'; '.join(found)}."


def _verdicts(row: dict[str, Any]) -> list[Verdict]:
    """Verdicts on a size, by both comparisons. What the control plane takes belongs to both."""
    beside = row["control_plane_overhead"]
    what = f"overhead at {milliseconds(row['plain_step_s'])} steps, {row['workers']} workers"
    return [
        Verdict(f"{what}, {how}", (found["overhead"] + beside) * 100, TARGET_PERCENT, "%", count_of(found))
        for how, found in (("same processes", row["within"]), ("beside torchrun", row))
    ]


def _is_judged(row: dict[str, Any]) -> bool:
    """The target is for steps of 100 ms and more; a machine a little faster than thought is no way out of it."""
    return bool(row["name"] == RELIGHT) and (
        row["nominal_ms"] >= LONG_STEP_MS or row["plain_step_s"] >= LONG_STEP_MS / 1e3
    )


def render(document: Document) -> str:
    """Markdown."""
    parts = document["parts"]
    header = [
        *("beside torchrun", "workers", "plain step", "overhead, 95 % interval", "added per step", "processor time"),
        *("control plane", "pairs", "medians of launches"),
        *("in the same processes, 95 % interval", "added per step", "processor time", "medians of launches"),
    ]
    rows = [
        [
            row["name"],
            str(row["workers"]),
            milliseconds(row["plain_step_s"]),
            overhead_cell(row),
            f"{row['added_s'] * 1e6:+.0f} us",
            f"{row['cpu_overhead'] * 100:+.2f} %",
            f"{row['control_plane_overhead'] * 100:+.3f} %",
            str(row["pairs"]),
            launches_cell(row),
            *_within_cells(row),
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
            "The control plane's share is that of launcher, controller and agent beyond torchrun's, of all cores.\n\n"
            "In the same processes: a job under relight takes its steps, and plain ones of the same model, through "
            "another DistributedDataParallel with a gloo group of its own and without relight's hooks, one after the "
            "other in the order A B B A, then B A A B. The luck of processes is the same for both. In torchrun's row, "
            "as a third control: plain steps beside plain ones.",
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


def _within_cells(row: dict[str, Any]) -> list[str]:
    found = row.get("within")
    if found is None:
        return [""] * 4
    added = f"{found['added_s'] * 1e6:+.0f} us"
    return [overhead_cell(found), added, f"{found['cpu_overhead'] * 100:+.2f} %", launches_cell(found)]


def _series(rows: Sequence[dict[str, Any]]) -> list[Series]:
    """The curve: one mark for each number of workers, and one for the control."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['workers']} workers" if row["name"] == RELIGHT else "control"
        overhead = row.get("within", row)["overhead"]
        points.setdefault(name, []).append((row["plain_step_s"] * 1e3, overhead * 100))
    return [Series(name[0], name, found) for name, found in sorted(points.items(), reverse=True)]


def _parts_table(parts: dict[str, Any]) -> str:
    rows = [[name, f"{value:.1f} us"] for name, value in parts["parts_us"].items()]
    rows.append(["**all of these**", f"{parts['own_us']:.1f} us"])
    rows += [
        [f"fence, {workers} processes, {how}", f"{value:.1f} us"]
        for workers, figures in parts["fence_us"].items()
        for how, value in figures.items()
    ]
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
