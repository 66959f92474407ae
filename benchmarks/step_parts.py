"""Parts of a small step, and what they cost: one rank under relight, beside one under torchrun.

Both jobs are started in turns, several times, and each part is the median of its launches' medians: what each launch
took is in the JSON file. Small steps of many tensors, so that what relight adds is seen and not the noise of a long
step. A dictionary that steps add to after the write is carried, as most scripts have one.

Run by ``python -m benchmarks.step_parts``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
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
from benchmarks.figures import markdown_table
from benchmarks.jobs import PlainJob, RelightJob
from benchmarks.recovery.peers import JobFailed, trial_directory
from benchmarks.step_parts_job import PARTS

SCRIPT = "benchmarks.step_parts_job"
SHAPES = {
    "60 tensors, SGD": ("--layers", "30", "--steps", "1200"),
    "500 tensors, AdamW": ("--layers", "250", "--adam", "--steps", "240"),
}
LAUNCHES, QUICK_LAUNCHES = 5, 1
END_DEADLINE_S = 120.0
# relight at f510eb4 added 170 us to a step of 60 tensors on two cores; protection since then may add 100 us.
TARGETS_US = {"60 tensors, SGD": 270.0}


def launch(shape: str, directory: Path, *, plain: bool) -> dict[str, float]:
    """One job; the median time of each part, in microseconds. Raises JobFailed."""
    arguments = SHAPES[shape]
    job = (
        PlainJob(directory, SCRIPT, *arguments, "--plain", world_size=1)
        if plain
        else RelightJob(directory, SCRIPT, *arguments, world_size=1, standbys=0)
    )
    try:
        job.start()
        job.await_end(END_DEADLINE_S)
    finally:
        job.stop()
    for line in job.output.read_text().splitlines():
        if '{"parts":' in line:
            parts: dict[str, float] = json.loads(line[line.index("{") :])["parts"]
            return parts
    raise JobFailed(f"the job printed no times:\n{job.output.read_text()[-2000:]}")


def measure(shape: str, launches: int, workdir: Path) -> dict[str, Any]:
    """Both jobs in turns."""
    found: dict[str, list[dict[str, float]]] = {"relight": [], "torchrun": []}
    for number in range(2 * launches):
        name = ("relight", "torchrun", "torchrun", "relight")[number % 4]
        with trial_directory(workdir) as directory:
            found[name].append(launch(shape, directory, plain=name == "torchrun"))
    medians = {
        name: {part: statistics.median(one[part] for one in times) for part in PARTS} for name, times in found.items()
    }
    return {"shape": shape, "launches": found, **medians}


def run(launches: int, workdir: Path) -> Document:
    """Measure all shapes."""
    document = start_document("step_parts", launches=launches)
    progress = Progress(len(SHAPES))
    document["rows"], document["not_measured"] = [], []
    for shape in SHAPES:
        try:
            row = measure(shape, launches, workdir)
        except (JobFailed, OSError, ValueError) as error:
            document["not_measured"].append(f"{shape}: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        document["rows"].append(row)
        progress.done(f"{shape}: relight adds {_added_us(row):.0f} us")
    document["headline"] = "; ".join(f"{row['shape']}: {_added_us(row):+.0f} us a step" for row in document["rows"])
    verdicts = [
        Verdict(f"added to a step of {row['shape']}", _added_us(row), TARGETS_US[row["shape"]], "us")
        for row in document["rows"]
        if row["shape"] in TARGETS_US
    ]
    add_verdicts(document, verdicts)
    return document


def _added_us(row: dict[str, Any]) -> float:
    return float(sum(row["relight"][part] - row["torchrun"][part] for part in PARTS))


def render(document: Document) -> str:
    """Markdown."""
    rows = [
        [row["shape"], name, *(f"{row[name][part]:.0f}" for part in PARTS), f"{sum(row[name].values()):.0f}"]
        for row in document["rows"]
        for name in ("torchrun", "relight")
    ]
    return "\n\n".join(
        [
            "Processor time of the main thread in each part of a step, in microseconds: medians of launches' medians. "
            "The barrier stands before the optimizer's step; `leave` is the end of the block and all that comes before "
            "the next one.",
            markdown_table(["step", "job", *PARTS, "sum"], rows),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *(f"Not measured: {text}" for text in document["not_measured"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The parts of a step, beside torchrun")
    parser.add_argument("--quick", action="store_true", help="one launch of each job")
    parser.add_argument("--output", type=Path, default=RESULTS / "step_parts.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(QUICK_LAUNCHES if options.quick else LAUNCHES, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
