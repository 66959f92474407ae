"""Recovery time against the number of workers: which stages grow, and by how much for each worker more.

Workers with a small model, so that copying takes nothing and what remains is the protocol: noticing, stopping,
deciding, forming the new group, the handshake. One worker is killed at a time, at a random moment, once a standby
is warm. The workers pause in each step as hosts of computing devices do; still, all of them share this machine's
cores, so that anything every worker does at once takes longer with more of them. A separate measurement shows how
much of the growth that is: forming one group of so many idle processes, without relight.

Run by ``python -m benchmarks.scaling``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.documents import RESULTS, Document, Progress, command, measure_apart, start_document, write_document
from benchmarks.figures import fit_line, markdown_table, milliseconds
from benchmarks.jobs import Journal, RelightJob
from benchmarks.kills import await_calm, kill_rank
from benchmarks.recovery.peers import JobFailed, trial_directory
from benchmarks.recovery.relight import PARTS, PATH, path_of

WORKERS = (2, 4, 8, 16)
KILLS = 4  # at each number of workers
PAUSE_MS = 20  # in each step
ENDLESS = 10**7
# Slower growth than this for each worker is not told from noise here.
NOISE_S = 0.0005


def measure(workers: int, kills: int, seed: int, workdir: Path) -> list[dict[str, Any]]:
    """One job of so many workers, and what each kill took."""
    draw = random.Random(f"{seed}/{workers}")
    script = ("benchmarks.tiny_ddp", "--steps", str(ENDLESS), "--pause-ms", str(PAUSE_MS))
    with trial_directory(workdir) as directory:
        job = RelightJob(directory, *script, world_size=workers)
        journal = Journal(job.run_dir)
        moments: list[tuple[int, int]] = []
        try:
            job.start()
            for number in range(kills):
                await_calm(job, journal)
                time.sleep(draw.uniform(0.2, 0.2 + 2 * PAUSE_MS / 1e3))  # the random moment of the fault
                moments.append(kill_rank(job, journal, draw.randrange(workers), generation=number + 2, workers=workers))
        finally:
            job.stop()
        journal.poll()
        report = job.report()
        found = []
        for recovery, (fault_ns, computing_ns) in zip(report.recoveries, moments, strict=False):
            stages = msgspec.structs.asdict(recovery.stages)
            path = path_of(journal, recovery, fault_ns, computing_ns)
            parts = {name: stages[f"{name}_seconds"] for name in PARTS}
            found.append({"workers": workers, "path_s": path, "parts_s": parts, "kind": recovery.replacement_kind})
        return found


def run(counts: Sequence[int], kills: int, seed: int, workdir: Path) -> Document:
    """All numbers of workers, from few to many."""
    document = start_document("scaling", kills=kills, pause_ms=PAUSE_MS, standbys=1, seed=seed)
    progress = Progress(len(counts))
    trials: list[dict[str, Any]] = []
    document["not_measured"] = []
    for workers in counts:
        try:
            found = measure(workers, kills, seed, workdir)
        except JobFailed as error:
            document["not_measured"].append(f"{workers} workers: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        trials += found
        totals = [sum(trial["path_s"].values()) for trial in found]
        progress.done(f"{workers} workers: {milliseconds(statistics.median(totals))} in the median of {len(totals)}")
    document["trials"] = trials
    document["growth"] = growth(trials)
    document["headline"] = _what_grows(document["growth"])
    document["form_s"] = measure_apart("form_speed", "--workers", *map(str, counts))
    return document


def growth(trials: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each stage, its time with no worker by the least-squares line, and what each worker adds."""
    counts = [trial["workers"] for trial in trials]
    found = {}
    for name in (*PATH, *PARTS, "total"):
        line = fit_line(counts, [_stage_s(trial, name) for trial in trials])
        if line is not None:
            found[name] = {"per_worker_s": line.slope, "error_s": line.slope_error, "at_zero_s": line.intercept}
    return found


def _stage_s(trial: dict[str, Any], name: str) -> float:
    if name == "total":
        return float(sum(trial["path_s"].values()))
    return float(trial["path_s"].get(name, trial["parts_s"].get(name, 0.0)))


def render(document: Document) -> str:
    """Markdown."""
    trials = document["trials"]
    counts = sorted({trial["workers"] for trial in trials})
    names = []
    for name in PATH:
        names.append((name, name))
        if name == "restore":
            names += [(f"– {part}", part) for part in PARTS]
    names.append(("**total**", "total"))
    rows = [
        [label, *(_cell(trials, count, name) for count in counts), _growth_cell(document["growth"].get(name))]
        for label, name in names
    ]
    formed = [milliseconds(document["form_s"].get(str(count))) for count in counts]
    rows.append(["gloo alone forms a group in", *formed, ""])
    header = ["stage", *(f"{count} workers" for count in counts), "each worker adds"]
    settings = document["settings"]
    return "\n\n".join(
        [
            f"Small workers on {document['hardware']['cores']} cores, a warm standby, {settings['kills']} kills at "
            f"each number of workers, a pause of {settings['pause_ms']} ms in each step. Medians, from the kill until "
            "every rank computes again; the growth is the slope of the least-squares line with its standard error.",
            markdown_table(header, rows),
            document["headline"],
            *(f"Not measured: {text}" for text in document["not_measured"]),
        ]
    )


def _cell(trials: Sequence[dict[str, Any]], workers: int, name: str) -> str:
    values = [_stage_s(trial, name) for trial in trials if trial["workers"] == workers]
    return milliseconds(statistics.median(values)) if values else "–"


def _growth_cell(line: dict[str, float] | None) -> str:
    if line is None:
        return "–"
    return f"{line['per_worker_s'] * 1e3:+.2f} ± {line['error_s'] * 1e3:.2f} ms"


def _grows(line: dict[str, float]) -> bool:
    return line["per_worker_s"] > max(NOISE_S, 2 * line["error_s"])


def _what_grows(lines: dict[str, dict[str, float]]) -> str:
    if not lines:
        return "Too few numbers of workers to tell what grows."
    growing = [name for name in (*PATH, *PARTS) if name in lines and _grows(lines[name])]
    if not growing:
        return "No stage grows with the number of workers by more than the noise."
    largest = sorted(growing, key=lambda name: -lines[name]["per_worker_s"])
    named = ", ".join(f"{name} ({_growth_cell(lines[name])})" for name in largest)
    return (
        f"What grows with the number of workers, for each worker more: {named}. All other stages are flat within the "
        "noise. On one machine every worker more also means less of a core for each of them."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Recovery time against the number of workers")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--kills", type=int, default=KILLS, help="at each number of workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "scaling.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.workers, options.kills, options.seed, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
