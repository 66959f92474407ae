"""The cost of buddy memory while nothing fails (`training.buddy(every=10)`), against the size of the state.

An FSDP2 loop makes a snapshot in every fifteenth step, and the steps around it are the measure of what it costs (see
`cycles`): all ranks copy their part, and fetch that of their ward through shared memory. Ranks, copies and transfers
share the machine's cores, as they would where training computes on all of them; on GPUs only host memory and its
processors are shared.

Two jobs side by side, one of them without buddies, differ by a tenth whichever has them: launches are not alike. What a
step costs because buddies exist at all is one more number in the barrier's sum, and is not measured here.

Run by ``python -m benchmarks.buddy``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import cycles
from benchmarks.documents import (
    RESULTS,
    Document,
    Progress,
    Verdict,
    add_verdicts,
    command,
    start_document,
    verdict_rows,
    write_document,
)
from benchmarks.figures import Series, markdown_table, milliseconds, plot
from benchmarks.gated_fsdp import LAYERS
from benchmarks.jobs import RelightJob
from benchmarks.recovery.peers import JobFailed
from benchmarks.turns import Make, overhead_cell

SCRIPT = "benchmarks.gated_fsdp"
EVERY = 10
WORKERS = 2
WIDTHS = (512, 1024, 2048)
STEP_S = 0.25  # about; the target is for steps of 200 ms and more
LEAST_STEP_S = 0.2
# All room for snapshots is made by then, and the sixth step of each cycle begins with one.
FIRST_STEP = 2 * cycles.CYCLE - cycles.THIRD
QUICK_LAUNCHES = 2
BUDGET_S = 120.0  # of cycles, for one size
TARGET_PERCENT = 2.0
PROBE_BATCH = 64


def state_mib(width: int) -> float:
    """The state of one rank: its share of the parameters, and two moments of each."""
    return LAYERS * (width + 1) * width * 4 * 3 / WORKERS / 2**20


def job(width: int, batch: int, *arguments: str) -> Make:
    """The loop under `relight run`."""
    sizes = ("--width", str(width), "--batch", str(batch))

    def make(directory: Path, to_gate: tuple[str, ...]) -> RelightJob:
        return RelightJob(directory, SCRIPT, *to_gate, *sizes, *arguments, world_size=WORKERS, standbys=0)

    return make


def choose_batch(width: int) -> int:
    """So that a step takes about STEP_S: by forward and backward of the same layers on one core of this machine."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    x = torch.randn(PROBE_BATCH, width)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        model(x).square().mean().backward()
        times.append(time.perf_counter() - started)
    return max(8, round(PROBE_BATCH * STEP_S / min(times)))


def measure(width: int, budget_s: float, launches: int, workdir: Path) -> dict[str, Any]:
    """One size."""
    batch = choose_batch(width)
    found = cycles.measure(
        job(width, batch, "--buddy", str(cycles.CYCLE)),
        WORKERS,
        workdir,
        budget_s=budget_s,
        first_step=FIRST_STEP,
        every=EVERY,
        launches=launches,
    )
    return {"width": width, "batch": batch, "mib": state_mib(width)} | found


def run(widths: Sequence[int], budget_s: float, launches: int, workdir: Path) -> Document:
    """All sizes."""
    document = start_document("buddy", every=EVERY, workers=WORKERS, budget_s=budget_s)
    progress = Progress(len(widths))
    document["rows"], document["not_measured"] = [], []
    for width in widths:
        try:
            row = measure(width, budget_s, launches, workdir)
        except (JobFailed, OSError, ValueError) as error:
            document["not_measured"].append(f"{state_mib(width):.0f} MiB: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        document["rows"].append(row)
        progress.done(f"{row['mib']:.0f} MiB, steps of {milliseconds(row['step_s'])}: {overhead_cell(row)}")
    document["headline"] = headline(document["rows"])
    judged = [row for row in document["rows"] if row["step_s"] >= LEAST_STEP_S]
    add_verdicts(document, [_verdict(row) for row in judged])
    return document


def headline(rows: Sequence[dict[str, Any]]) -> str:
    """The result in a sentence."""
    found = [f"{row['mib']:.0f} MiB {overhead_cell(row)}" for row in rows]
    return f"A snapshot every {EVERY} steps, by state of a rank, with 95 % intervals: {'; '.join(found)}."


def _verdict(row: dict[str, Any]) -> Verdict:
    what = f"buddy memory every {EVERY} steps of {milliseconds(row['step_s'])}, {row['mib']:.0f} MiB a rank"
    return Verdict(what, row["overhead"] * 100, TARGET_PERCENT, "%", _count(row))


def _count(row: dict[str, Any]) -> str:
    low, high = (bound * 100 for bound in row["interval"])
    count = f"{row['cycles']} snapshots in {row['launches']} launches"
    return f"{count}, 95 % interval {low:+.2f} to {high:+.2f} %"


def _added(seconds: float, interval: Sequence[float]) -> str:
    low, high = interval
    return f"{seconds * 1e3:+.1f} ms [{low * 1e3:+.1f}, {high * 1e3:+.1f}]"


def render(document: Document) -> str:
    """Markdown."""
    rows = [
        [
            f"{row['mib']:.0f} MiB",
            milliseconds(row["step_s"]),
            overhead_cell(row),
            _added(row["added_s"], row["added_interval_s"]),
            ", ".join(f"{spent * 1e3:+.1f}" for spent in row["by_step_s"]),
            milliseconds(row["cpu_added_s"]),
            str(row["cycles"]),
            ", ".join(f"{share * 100:+.1f}" for share in row["by_launch"]),
        ]
        for row in document["rows"]
    ]
    header = [
        "state of a rank",
        "step",
        f"overhead of one in {EVERY} steps, 95 % interval",
        "added by a snapshot",
        "of that, ms, in its step and the next ones",
        "processor time of a rank for each",
        "snapshots",
        "medians of launches, %",
    ]
    points = [(row["mib"], row["overhead"] * 100) for row in document["rows"]]
    curve = plot([Series("b", "buddy memory", points)], x_name="state, MiB (logarithmic)", y_name="overhead, %")
    return "\n\n".join(
        [
            f"FSDP2 on {WORKERS} ranks, a snapshot in every {cycles.CYCLE}th step. What the {cycles.THIRD} steps from "
            f"it on take longer than the {cycles.THIRD} before and the {cycles.THIRD} after, in the same processes; "
            f"started several times. As a share of {EVERY} steps, since `training.buddy(every={EVERY})` makes one so "
            "often. The copy is made beside forward and backward, and fetched by the buddy beside the next steps; both "
            "use the cores that compute.",
            markdown_table(header, rows),
            *([f"```\n{curve}\n```"] if len(points) > 1 else []),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *(f"Not measured: {text}" for text in document["not_measured"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of buddy memory")
    parser.add_argument("--quick", action="store_true", help="two sizes, two launches")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of measuring for one size")
    parser.add_argument("--output", type=Path, default=RESULTS / "buddy.json")
    options = parser.parse_args()
    widths, launches = (WIDTHS[:2], QUICK_LAUNCHES) if options.quick else (WIDTHS, cycles.LAUNCHES)
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(widths, options.budget_s, launches, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
