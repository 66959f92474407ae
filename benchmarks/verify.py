"""The cost of comparing the replicas' state (`relight run --verify-every K`): by itself, and in a job.

By itself: the digest of a state, against its size, beside what it costs to do nothing but read it. In a job: relight
that compares in every step beside relight that never does, both started several times (see `turns`); what a step takes
longer is the price of one comparison, which a job that compares every K steps pays once in K steps.

Run by ``python -m benchmarks.verify``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import turns
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
from benchmarks.overhead import relight
from benchmarks.recovery.peers import JobFailed
from benchmarks.turns import count_of, launches_cell, overhead_cell
from relight.training.state.tracked import TrackedState

STATE_MIB = (16, 64, 256, 1024)
ROUNDS = 7
THREADS = 2  # of a rank that computes with more than one
EVERY = 50
STEP_S = 0.2
TARGET_PERCENT = 0.5
WORKERS = 2
JOB_MS = (50, 250)  # nominal lengths of a step
QUICK_LAUNCHES = 2
BUDGET_S = 60.0  # of blocks, for one length of a step


def digest_row(mib: int) -> dict[str, float]:
    """Seconds for the digest of parameters and the state of Adam, `mib` in all, and for reading as many bytes."""
    width = 1024
    layers = max(1, mib * 2**20 // (3 * 4 * width * width))  # Adam keeps two numbers for each parameter
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = TrackedState({"model": model}, {"optimizer": optimizer}, {}, {})
    tensors = state.replica.flat().tensors
    nbytes = sum(tensor.nbytes for tensor in tensors)
    words = [tensor.view(-1).view(torch.int64) for tensor in tensors if tensor.nbytes >= 8]
    times: dict[str, list[float]] = {"digest_s": [], "threads_s": [], "read_s": []}
    for _ in range(ROUNDS):  # in turns
        times["digest_s"].append(_seconds(state.replica.digest))
        torch.set_num_threads(THREADS)
        times["threads_s"].append(_seconds(state.replica.digest))
        torch.set_num_threads(1)
        times["read_s"].append(_seconds(lambda: [word.max() for word in words]))
    return {"mib": nbytes / 2**20} | {name: statistics.median(found) for name, found in times.items()}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def run(sizes: Sequence[int], nominal: Sequence[int], budget_s: float, launches: int, workdir: Path) -> Document:
    """All sizes by themselves, then the jobs."""
    torch.set_num_threads(1)
    document = start_document("verify", state_mib=list(sizes), budget_s=budget_s, every=EVERY)
    progress = Progress(len(sizes) + len(nominal))
    document["digests"] = []
    for mib in sizes:
        row = digest_row(mib)
        document["digests"].append(row)
        progress.done(f"{mib} MiB of state: {milliseconds(row['digest_s'])}")
    document["jobs"], document["not_measured"] = [], []
    for nominal_ms in nominal:
        comparing, plain = relight(WORKERS, nominal_ms, "--verify-every", "1"), relight(WORKERS, nominal_ms)
        try:
            found = turns.measure(comparing, plain, WORKERS, workdir, budget_s=budget_s, launches=launches)
        except (JobFailed, OSError, ValueError) as error:
            document["not_measured"].append(f"steps of about {nominal_ms} ms: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        document["jobs"].append(found)
        progress.done(
            f"steps of {milliseconds(found['plain_step_s'])}: a comparison adds {milliseconds(found['added_s'])}"
        )
    document["headline"] = headline(document)
    digests = [_verdict(row) for row in document["digests"]]
    add_verdicts(document, digests + [_job_verdict(row) for row in document["jobs"]])
    return document


def headline(document: Document) -> str:
    """The result in a sentence."""
    largest = document["digests"][-1]
    return (
        f"One comparison of {largest['mib']:.0f} MiB of state for each rank takes {milliseconds(largest['digest_s'])}: "
        f"every {EVERY} steps of {milliseconds(STEP_S)}, {_percent(largest['digest_s'], STEP_S):.2f} % of the time."
    )


def _percent(seconds: float, step_s: float) -> float:
    return seconds / (EVERY * step_s) * 100


def _verdict(row: dict[str, Any]) -> Verdict:
    what = f"{row['mib']:.0f} MiB compared every {EVERY} steps of {milliseconds(STEP_S)}"
    return Verdict(what, _percent(row["digest_s"], STEP_S), TARGET_PERCENT, "%", "one core, host memory")


def _job_verdict(row: dict[str, Any]) -> Verdict:
    what = f"a job of {WORKERS} workers that compares every {EVERY} steps of {milliseconds(row['plain_step_s'])}"
    return Verdict(what, row["overhead"] * 100 / EVERY, TARGET_PERCENT, "%", f"compared in every step: {count_of(row)}")


def render(document: Document) -> str:
    """Markdown."""
    digests = [
        [
            f"{row['mib']:.0f} MiB",
            milliseconds(row["digest_s"]),
            milliseconds(row["threads_s"]) if "threads_s" in row else "",
            milliseconds(row["read_s"]),
            f"{row['mib'] / 1024 / row['digest_s']:.1f} GiB/s",
            f"{_percent(row['digest_s'], STEP_S):.3f} %",
        ]
        for row in document["digests"]
    ]
    jobs = [
        [
            milliseconds(row["plain_step_s"]),
            milliseconds(row["added_s"]),
            overhead_cell(row),
            f"{row['overhead'] * 100 / EVERY:+.3f} %",
            milliseconds(row["cpu_added_s"] / WORKERS),
            str(row["pairs"]),
            launches_cell(row),
        ]
        for row in document["jobs"]
    ]
    curve = plot(
        [Series("d", "digest", [(row["mib"], row["digest_s"] * 1e3) for row in document["digests"]])],
        x_name="state, MiB (logarithmic)",
        y_name="ms",
    )
    return "\n\n".join(
        [
            "A comparison is one digest of the state on every rank, all at the same time, and a few numbers more in an "
            "all-reduce that every step has anyway. The limit is reading the state once. On ranks that share cores or "
            "memory bandwidth it takes longer.",
            markdown_table(
                [
                    "state",
                    "digest",
                    f"with {THREADS} threads",
                    "reading it (torch.max)",
                    "rate",
                    f"every {EVERY} steps of 200 ms",
                ],
                digests,
            ),
            f"```\n{curve}\n```",
            f"In a job of {WORKERS} workers, beside one that does not compare, in turns, both started several times:",
            markdown_table(
                [
                    "step",
                    "added by a comparison",
                    "compared in every step, 95 % interval",
                    f"every {EVERY} steps",
                    "processor time of a rank for each",
                    "pairs",
                    "medians of launches, %",
                ],
                jobs,
            ),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *(f"Not measured: {text}" for text in document["not_measured"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What comparing the replicas' state costs")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of measuring for one length of a step")
    parser.add_argument("--quick", action="store_true", help="small states, one length of a step, two launches")
    parser.add_argument("--output", type=Path, default=RESULTS / "verify.json")
    options = parser.parse_args()
    sizes, nominal = (STATE_MIB[:2], JOB_MS[:1]) if options.quick else (STATE_MIB, JOB_MS)
    launches = QUICK_LAUNCHES if options.quick else turns.LAUNCHES
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(sizes, nominal, options.budget_s, launches, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
