"""What buddy memory costs while nothing fails (`training.buddy(every=10)`), against the size of the state.

The same FSDP2 loop under relight with and without it, both jobs alive, a block of ten steps each in turns, as in
`overhead`. Each block of the one with buddies makes one snapshot, in its middle: all ranks copy their part, and fetch
that of their ward through shared memory. Ranks, copies and transfers share the machine's cores, as they would where
training computes on all of them; on GPUs only host memory and its processors are shared.

Run by ``python -m benchmarks.buddy``.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
from benchmarks.overhead import Block, Side, accept, control_plane_cpu_s, figures_of, pair_of
from benchmarks.recovery.peers import JobFailed, trial_directory

SCRIPT = "benchmarks.gated_fsdp"
EVERY = 10
WORKERS = 2
WIDTHS = (512, 1024, 2048, 3072)
STEP_S = 0.25  # about; the target is for steps of 200 ms and more
LEAST_STEP_S = 0.2
WARM_UP_STEPS = EVERY + EVERY // 2  # the blocks that follow have a snapshot in their middle
MIN_PAIRS = 6
BUDGET_S = 60.0  # of blocks, for one size
TARGET_PERCENT = 2.0
PROBE_BATCH = 64


def state_mib(width: int) -> float:
    """Of one rank: its share of the parameters, and two moments of each."""
    return LAYERS * (width + 1) * width * 4 * 3 / WORKERS / 2**20


@contextlib.contextmanager
def two_jobs(width: int, batch: int, directory: Path) -> Iterator[tuple[Side, Side, tuple[RelightJob, RelightJob]]]:
    """With buddies, and without, at the gate."""
    gate = directory / "gate.sock"
    common = ("--gate", str(gate), "--width", str(width), "--batch", str(batch))
    folders = [directory / "a", directory / "b"]
    for folder in folders:
        (folder / "events").mkdir(parents=True)
    buddy = ("--buddy", str(EVERY))
    first = RelightJob(folders[0], SCRIPT, *common, "--name", "a", *buddy, world_size=WORKERS, standbys=0)
    second = RelightJob(folders[1], SCRIPT, *common, "--name", "b", world_size=WORKERS, standbys=0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(gate))
        listener.listen(4 * WORKERS)
        for job in (first, second):
            stack.callback(job.stop)
            job.start()
        links = accept(listener, WORKERS, (first, second))
        yield Side(links["a"]), Side(links["b"]), (first, second)


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


def measure(width: int, budget_s: float, workdir: Path) -> dict[str, Any]:
    """One size: pairs of blocks until the time is over."""
    batch = choose_batch(width)
    with trial_directory(workdir) as directory, two_jobs(width, batch, directory) as (first, second, jobs):
        for side in (first, second):
            side.run(WARM_UP_STEPS)
        before = control_plane_cpu_s(jobs)
        started = time.monotonic()
        pairs: list[tuple[Block, Block]] = []
        while len(pairs) < MIN_PAIRS or time.monotonic() < started + budget_s:
            pairs.append(pair_of(first, second, EVERY, swapped=len(pairs) % 2 == 1))
        wall_s = time.monotonic() - started
        shares = [(now - then) / wall_s for now, then in zip(control_plane_cpu_s(jobs), before, strict=True)]
        first.end()
        second.end()
    return {"width": width, "batch": batch, "mib": state_mib(width)} | figures_of([pairs], shares)


def run(widths: Sequence[int], budget_s: float, workdir: Path) -> Document:
    """All sizes."""
    document = start_document("buddy", every=EVERY, workers=WORKERS, budget_s=budget_s)
    progress = Progress(len(widths))
    document["rows"], document["not_measured"] = [], []
    for width in widths:
        try:
            row = measure(width, budget_s, workdir)
        except (JobFailed, OSError, ValueError) as error:
            document["not_measured"].append(f"{state_mib(width):.0f} MiB: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        document["rows"].append(row)
        progress.done(f"{row['mib']:.0f} MiB, steps of {milliseconds(row['plain_step_s'])}: {_percent(row)}")
    document["headline"] = headline(document["rows"])
    judged = [row for row in document["rows"] if row["plain_step_s"] >= LEAST_STEP_S]
    add_verdicts(document, [_verdict(row) for row in judged])
    return document


def headline(rows: Sequence[dict[str, Any]]) -> str:
    """The result in a sentence."""
    found = [f"{row['mib']:.0f} MiB {_percent(row)}" for row in rows]
    return f"A snapshot every {EVERY} steps, by state of a rank, with 95 % intervals: {'; '.join(found)}."


def _percent(row: dict[str, Any]) -> str:
    return f"{row['overhead'] * 100:+.2f} % [{row['interval'][0] * 100:+.2f}, {row['interval'][1] * 100:+.2f}]"


def _verdict(row: dict[str, Any]) -> Verdict:
    what = f"buddy memory every {EVERY} steps of {milliseconds(row['plain_step_s'])}, {row['mib']:.0f} MiB a rank"
    return Verdict(what, row["overhead"] * 100, TARGET_PERCENT, "%", f"{row['pairs']} pairs")


def render(document: Document) -> str:
    """Markdown."""
    rows = [
        [
            f"{row['mib']:.0f} MiB",
            milliseconds(row["plain_step_s"]),
            _percent(row),
            milliseconds(row["added_s"] * EVERY),
            f"{row['cpu_overhead'] * 100:+.2f} %",
            str(row["pairs"]),
        ]
        for row in document["rows"]
    ]
    header = [
        "state of a rank",
        "step",
        "overhead, 95 % interval",
        "added for each snapshot",
        "processor time",
        "pairs",
    ]
    points = [(row["mib"], row["overhead"] * 100) for row in document["rows"]]
    curve = plot([Series("b", "buddy memory", points)], x_name="state, MiB (logarithmic)", y_name="overhead, %")
    return "\n\n".join(
        [
            f"FSDP2 on {WORKERS} ranks with `training.buddy(every={EVERY})`, beside the same without it: both jobs "
            f"alive, blocks of {EVERY} steps in turns, one snapshot in each. The copy is made beside forward and "
            "backward, and fetched by the buddy beside the next steps; both use the cores that compute.",
            markdown_table(header, rows),
            *([f"```\n{curve}\n```"] if len(points) > 1 else []),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *(f"Not measured: {text}" for text in document["not_measured"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of buddy memory")
    parser.add_argument("--quick", action="store_true", help="two sizes")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--output", type=Path, default=RESULTS / "buddy.json")
    options = parser.parse_args()
    widths = WIDTHS[:2] if options.quick else WIDTHS
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(widths, options.budget_s, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
