"""The time until a failure is noticed, and until the survivors stand still.

Planned faults carry the exact time at which they struck: the worker stamps it into its position page in the
instruction before. Each job goes through many of them, at every point of a step and on every rank in turn. Two
loads: idle cores (workers pause in each step, as a host does while its device computes) and busy cores (four
workers compute on two cores all the time).

A crash is noticed by the agent, which the kernel tells of the end of a process. A frozen process is there and says
nothing, so it is given ``--frozen-timeout-seconds`` first; what comes on top of that is shown as well.
Stopping is measured twice: by the controller, from the order to the last survivor's report, and by the survivors,
from the arrival of the order to standing still.

Run by ``python -m benchmarks.detection``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from benchmarks.figures import markdown_table, milliseconds, percentile, spread, spread_cell
from benchmarks.jobs import Journal, RelightJob
from benchmarks.recovery.peers import JobFailed, trial_directory
from relight.core.account.report import JobReport

WORLD_SIZE = 4
FAULTS = 12  # of each kind under each load
FIRST_STEP = 40
NOTICE_TARGET_S = 0.010
STOP_TARGET_S = 0.050
FAULT_DEADLINE_S = 60.0  # for one fault and the steps up to the next, on a slow machine
FROZEN_TIMEOUT_S = 1.0  # relight's default
PLACES = (
    "in FORWARD of step",
    "in BACKWARD of step",
    "in BEFORE_BARRIER of step",
    "in BARRIER of step",
    "in OPTIMIZER of step",
    "after step",
)


@dataclass(frozen=True)
class Load:
    """Acts of the workers between faults, and how many steps lie between two: time for a standby to get warm."""

    name: str
    script: tuple[str, ...]
    steps_between: int


LOADS = (
    Load("idle cores", ("--pause-ms", "10"), 220),
    Load("busy cores", ("--width", "768", "--batch", "192"), 60),
)


def sentences(action: str, count: int, between: int) -> list[str]:
    """The plan: every place in turn, the ranks likewise, out of phase with each other."""
    return [
        f"{action} rank {(index + index // WORLD_SIZE) % WORLD_SIZE} {PLACES[index % len(PLACES)]} "
        f"{FIRST_STEP + index * between}"
        for index in range(count)
    ]


def measure(load: Load, action: str, count: int, workdir: Path) -> dict[str, Any]:
    """One job that goes through `count` faults."""
    flags = tuple(word for sentence in sentences(action, count, load.steps_between) for word in ("--chaos", sentence))
    steps = FIRST_STEP + (count - 1) * load.steps_between + 10
    with trial_directory(workdir) as directory:
        job = RelightJob(
            directory,
            *("benchmarks.tiny_ddp", "--steps", str(steps), *load.script),
            world_size=WORLD_SIZE,
            flags=(*flags, "--frozen-timeout-seconds", str(FROZEN_TIMEOUT_S)),
        )
        try:
            job.start()
            job.await_end(FAULT_DEADLINE_S * (count + 1))
        finally:
            job.stop()
        journal = Journal(job.run_dir)
        journal.poll()
        return _figures(load, action, job.report(), journal)


def _figures(load: Load, action: str, report: JobReport, journal: Journal) -> dict[str, Any]:
    # A survivor may fail by itself in a recovery; only what was planned has a known time.
    noticed = [failure for failure in report.failures if failure.detect_seconds is not None and not failure.estimated]
    notice_s = [failure.detect_seconds for failure in noticed if failure.detect_seconds is not None]
    stop_s = [recovery.stages.stop_seconds for recovery in report.recoveries]
    stopped = [entry.fields for entry in journal.of("Stopped") if not entry.fields["blank"]]
    own_stop_s = [float(fields["stop_seconds"]) for fields in stopped]
    waited_s = FROZEN_TIMEOUT_S if action == "freeze" else 0.0
    return {
        "load": load.name,
        "fault": action,
        "recoveries": len(report.recoveries),
        "phases": [failure.phase for failure in noticed],
        "replacements": sorted({recovery.replacement_kind for recovery in report.recoveries}),
        "notice_s": [round(value, 6) for value in notice_s],
        "stop_s": [round(value, 6) for value in stop_s],
        "own_stop_s": [round(value, 6) for value in own_stop_s],
        "notice": spread(notice_s),
        "notice_after_timeout": spread([value - waited_s for value in notice_s]),
        "stop": spread(stop_s),
        "own_stop": spread(own_stop_s),
        "stops_within_target": sum(value <= STOP_TARGET_S for value in stop_s),
    }


def run(count: int, workdir: Path) -> Document:
    """All jobs, one after another."""
    document = start_document(
        "detection", world_size=WORLD_SIZE, standbys=1, faults=count, frozen_timeout_s=FROZEN_TIMEOUT_S
    )
    progress = Progress(2 * len(LOADS))
    rows: list[dict[str, Any]] = []
    document["not_measured"] = []
    for load in LOADS:
        for action in ("kill", "freeze"):
            try:
                rows.append(measure(load, action, count, workdir))
                progress.done(f"{load.name}, {action}: {rows[-1]['recoveries']} recoveries")
            except JobFailed as error:
                document["not_measured"].append(f"{load.name}, {action}: {error}")
                progress.skipped(document["not_measured"][-1])
    document["rows"] = rows
    document["headline"] = headline(rows)
    add_verdicts(document, [verdict for row in rows for verdict in _verdicts(row)])
    return document


def headline(rows: list[dict[str, Any]]) -> str:
    """The result in a sentence."""
    found = []
    for row in rows:
        noticed = f"noticed after {milliseconds(row['notice'].get('median'))}, " if row["fault"] == "kill" else ""
        found.append(f"{row['fault']}, {row['load']}: {noticed}stopped in {milliseconds(row['stop'].get('median'))}")
    return f"Medians. {'; '.join(found)}."


def _verdicts(row: dict[str, Any]) -> list[Verdict]:
    found = []
    where = f"{row['fault']}, {row['load']}"
    if row["fault"] == "kill":
        found.append(_verdict(f"crash noticed ({where}), median", row["notice_s"], NOTICE_TARGET_S))
    found.append(_verdict(f"survivors stopped ({where}), median", row["stop_s"], STOP_TARGET_S))
    return found


def _verdict(what: str, values: list[float], target: float) -> Verdict:
    if not values:
        return Verdict(what, None, target * 1e3, "ms")
    note = f"p95 {percentile(values, 0.95) * 1e3:.3g} ms, max {max(values) * 1e3:.3g} ms of {len(values)}"
    return Verdict(what, statistics.median(values) * 1e3, target * 1e3, "ms", note)


def render(document: Document) -> str:
    """Markdown."""
    settings = document["settings"]
    rows = [
        [
            f"{row['fault']}, {row['load']}",
            str(row["recoveries"]),
            spread_cell(row["notice"]),
            spread_cell(row["notice_after_timeout"]) if row["fault"] == "freeze" else "",
            spread_cell(row["stop"]),
            spread_cell(row["own_stop"]),
        ]
        for row in document["rows"]
    ]
    header = [
        *("fault, load", "recoveries", "fault to notice"),
        f"of that beyond the {settings['frozen_timeout_s']:g} s that a frozen process is given",
        *("order to last survivor's report", "the same, as each survivor saw it"),
    ]
    parts = [
        f"{settings['world_size']} workers with a small model, {settings['faults']} planned faults of each kind under "
        "each load, at all points of a step and on all ranks in turn. Median / 95th percentile / greatest.",
        markdown_table(header, rows),
        markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
        "What the same takes in workers with about 20 M parameters is the stage `detect` in recovery.md.",
    ]
    parts += [f"Not measured: {text}" for text in document["not_measured"]]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to notice a failure, and to stop the survivors")
    parser.add_argument("--faults", type=int, default=FAULTS, help="of each kind under each load")
    parser.add_argument("--output", type=Path, default=RESULTS / "detection.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.faults, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
