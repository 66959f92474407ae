"""Recovery under DDP, HSDP and tensor parallelism with replicas, with the same bytes of state on each rank.

Jobs of the layouts take turns; in each, one rank is killed at a time, at a random moment, once a standby is warm. The
time is from the kill until every rank computes again; the redo of the step, which depends on the layout, is not in it.

Run by ``python -m benchmarks.layouts``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

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
from benchmarks.figures import markdown_table, milliseconds
from benchmarks.jobs import Journal, RelightJob
from benchmarks.kills import await_calm, kill_rank
from benchmarks.recovery.peers import JobFailed, trial_directory
from benchmarks.recovery.relight import PARTS, PATH, path_of

LAYOUTS = {"ddp": "DDP", "hsdp": "HSDP 2 x 2", "tp_dp": "TP x DP 2 x 2"}
WORKERS = 4
ROUNDS, KILLS = 3, 4
BLOCKS = 4
RANDOM_MOMENT_S = 1.0
TARGET = 1.5  # times DDP


def measure(layout: str, kills: int, seed: str, workdir: Path) -> list[dict[str, Any]]:
    """One job, and what each kill took."""
    draw = random.Random(seed)
    with trial_directory(workdir) as directory:
        job = RelightJob(
            directory, "benchmarks.layout_job", "--layout", layout, "--blocks", str(BLOCKS), world_size=WORKERS
        )
        journal = Journal(job.run_dir)
        moments: list[tuple[int, int]] = []
        try:
            job.start()
            for number in range(kills):
                await_calm(job, journal)
                time.sleep(draw.uniform(0.2, 0.2 + RANDOM_MOMENT_S))
                moments.append(kill_rank(job, journal, draw.randrange(WORKERS), generation=number + 2, workers=WORKERS))
        finally:
            job.stop()
        journal.poll()
        found = []
        for recovery, (fault_ns, computing_ns) in zip(job.report().recoveries, moments, strict=False):
            stages = msgspec.structs.asdict(recovery.stages)
            found.append(
                {
                    "layout": layout,
                    "path_s": path_of(journal, recovery, fault_ns, computing_ns),
                    "parts_s": {name: stages[f"{name}_seconds"] for name in PARTS},
                    "moved_bytes": recovery.moved_bytes,
                    "kind": recovery.replacement_kind,
                }
            )
        return found


def run(rounds: int, kills: int, seed: int, workdir: Path) -> Document:
    """All layouts in turns."""
    document = start_document("layouts", rounds=rounds, kills=kills, workers=WORKERS, blocks=BLOCKS, seed=seed)
    document["not_measured"] = []
    progress = Progress(rounds * len(LAYOUTS))
    trials: list[dict[str, Any]] = []
    for number in range(rounds):
        for layout, name in LAYOUTS.items():
            try:
                found = measure(layout, kills, f"{seed}/{number}", workdir)
            except JobFailed as error:
                document["not_measured"].append(f"{layout}: {error}")
                progress.skipped(document["not_measured"][-1])
                continue
            trials += found
            progress.done(f"{name}: {', '.join(milliseconds(_total_s(trial)) for trial in found)}")
    document["trials"] = trials
    base = _median_s(trials, "ddp")
    verdicts = []
    for layout in list(LAYOUTS)[1:]:
        own = _median_s(trials, layout)
        ratio = None if own is None or base is None else own / base
        note = "" if ratio is None else f"{milliseconds(own)} of {milliseconds(base)}"
        verdicts.append(Verdict(f"recovery of {LAYOUTS[layout]}, of DDP's", ratio, TARGET, "", note))
    add_verdicts(document, verdicts)
    return document


def _total_s(trial: dict[str, Any]) -> float:
    return float(sum(trial["path_s"].values()))


def _median_s(trials: list[dict[str, Any]], layout: str) -> float | None:
    totals = [_total_s(trial) for trial in trials if trial["layout"] == layout]
    return statistics.median(totals) if totals else None


def render(document: Document) -> str:
    """Markdown."""
    trials = document["trials"]
    rows = []
    for name in (*PATH, *(f"– {part}" for part in PARTS)):
        row = [name]
        for layout in LAYOUTS:
            own = [trial for trial in trials if trial["layout"] == layout]
            values = [trial["path_s"].get(name, trial["parts_s"].get(name[2:], 0.0)) for trial in own]
            row.append(milliseconds(statistics.median(values)) if values else "–")
        rows.append(row)
    totals = [_median_s(trials, layout) for layout in LAYOUTS]
    rows.append(["**total**", *(milliseconds(total) if total is not None else "–" for total in totals)])
    moved = [[trial["moved_bytes"] for trial in trials if trial["layout"] == layout] for layout in LAYOUTS]
    rows.append(["moved", *(f"{statistics.median(own) / 2**20:.1f} MiB" if own else "–" for own in moved)])
    settings = document["settings"]
    return "\n\n".join(
        [
            f"{settings['workers']} workers, a warm standby, {settings['rounds']} jobs of each layout in turns, "
            f"{settings['kills']} kills in each. Medians from the kill until every rank computes again. Parts of the "
            "restore are those of the slowest rank.",
            markdown_table(["stage", *LAYOUTS.values()], rows),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *(f"Not measured: {text}" for text in document["not_measured"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Recovery time by layout")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="jobs of each layout")
    parser.add_argument("--kills", type=int, default=KILLS, help="in each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "layouts.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.rounds, options.kills, options.seed, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
