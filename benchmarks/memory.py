"""Nothing may grow with the number of steps: memory and files of a job over ten thousand short steps.

Resident memory of every process is read from /proc while the job trains, with the number of steps done at that
moment. The slope of the least-squares line after the warm-up says what a step leaves behind. The same script under
torchrun shows what torch itself leaves behind. Files in the run directory are followed too: the trace of phases grows
up to a bound, everything else must not.

Run by ``python -m benchmarks.memory``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
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
    start_document,
    verdict_rows,
    write_document,
)
from benchmarks.figures import fit_line, markdown_table, mebibytes
from benchmarks.jobs import CONTROL_PLANE, PlainJob, RelightJob
from benchmarks.recovery.peers import JobFailed, trial_directory
from benchmarks.tiny_ddp import PROGRESS
from relight.server.trace import MAX_TRACE_BYTES

STEPS = 10_000
WORLD_SIZE = 2
# Allocators settle, modules are imported late, and the ring of phase stamps in the position page is written for the
# first time, page by page.
WARM_UP_STEPS = 2_000
SAMPLE_S = 0.5
STEP_DEADLINE_S = 0.2  # a slow machine's time for a step, on average
# A slope below this is a few pages over the whole run: allocators do that by themselves.
TARGET_BYTES_PER_STEP = 32.0
WORKER = "benchmarks.tiny_ddp"


def measure(steps: int, workdir: Path, *, plain: bool) -> dict[str, Any]:
    """One job, sampled until it ends."""
    with trial_directory(workdir) as directory:
        counter = directory / "steps"
        counter.write_bytes(bytes(PROGRESS.size))
        arguments = ("--steps", str(steps), "--progress", str(counter))
        job: RelightJob | PlainJob
        if plain:
            job = PlainJob(directory, WORKER, *arguments, "--plain", world_size=WORLD_SIZE)
        else:
            job = RelightJob(directory, WORKER, *arguments, world_size=WORLD_SIZE, standbys=1)
        samples: list[dict[str, Any]] = []
        started = time.monotonic()
        try:
            job.start()
            while job.exited() is None:
                _sample(job, counter, samples)
                if time.monotonic() > started + 60.0 + steps * STEP_DEADLINE_S:
                    raise JobFailed(f"{steps} steps were not done in time")
                time.sleep(SAMPLE_S)
            job.await_end(1.0)
        finally:
            job.stop()
    return _figures(samples)


def _sample(job: RelightJob | PlainJob, counter: Path, samples: list[dict[str, Any]]) -> None:
    (done,) = PROGRESS.unpack(counter.read_bytes())
    if not done:
        return  # still starting
    files = {} if isinstance(job, PlainJob) else _file_bytes(job.run_dir)
    samples.append({"step": done, "resident": _resident_bytes(job.pid), "files": files})


def _resident_bytes(launcher_pid: int) -> dict[str, int]:
    """Resident memory by role; of several workers or standbys, each has its own line."""
    found: dict[str, int] = {}
    try:
        launcher = psutil.Process(launcher_pid)
        for process in (launcher, *launcher.children(recursive=True)):
            role = _role(process)
            if role is not None:
                found[role] = process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass  # it ends just now
    return found


def _role(process: psutil.Process) -> str | None:
    words = process.cmdline()
    for role, module in CONTROL_PLANE.items():
        if module in words:
            return role
    if "torch.distributed.run" in words:
        return "torchrun"
    environment = process.environ()
    if environment.get("RELIGHT_ROLE") == "standby":
        return "standby"
    return f"worker {environment['RANK']}" if "RANK" in environment else None


def _file_bytes(run_dir: Path) -> dict[str, int]:
    """Sizes in the run directory: trace, journal, and all the rest."""
    found = {"trace": 0, "journal": 0, "other": 0}
    for path in run_dir.rglob("*"):
        try:
            size = path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
        kind = path.name.partition(".")[0]
        found[kind if kind in found else "other"] += size
    return found


def _figures(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    warm = [sample for sample in samples if sample["step"] >= WARM_UP_STEPS]
    roles = sorted({role for sample in warm for role in sample["resident"]})
    kinds = sorted({kind for sample in warm for kind in sample["files"]})
    return {
        "samples": len(warm),
        "resident": {role: _slope(warm, "resident", role) for role in roles},
        "files": {kind: _slope(warm, "files", kind) for kind in kinds},
        "steps": [sample["step"] for sample in samples],
        "resident_bytes": {role: [sample["resident"].get(role) for sample in samples] for role in roles},
    }


def _slope(samples: Sequence[dict[str, Any]], group: str, name: str) -> dict[str, float]:
    points = [(sample["step"], sample[group][name]) for sample in samples if name in sample[group]]
    line = fit_line([x for x, _ in points], [y for _, y in points])
    return {
        "first_bytes": points[0][1],
        "last_bytes": points[-1][1],
        "bytes_per_step": line.slope if line else 0.0,
        "error": line.slope_error if line else 0.0,
    }


def run(steps: int, workdir: Path) -> Document:
    """relight, then torchrun."""
    document = start_document("memory", steps=steps, world_size=WORLD_SIZE, standbys=1, warm_up_steps=WARM_UP_STEPS)
    progress = Progress(2)
    document["not_measured"] = []
    for name, plain in (("relight", False), ("torchrun", True)):
        try:
            document[name] = measure(steps, workdir, plain=plain)
        except JobFailed as error:
            document["not_measured"].append(f"{name}: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        progress.done(f"{name}: {steps} steps, {document[name]['samples']} samples after the warm-up")
    add_verdicts(document, _verdicts(document))
    slopes = [line["bytes_per_step"] for line in document.get("relight", {}).get("resident", {}).values()]
    document["headline"] = (
        f"Over {steps} steps, no process of relight grows by more than {max(slopes, default=0.0):.1f} bytes per step."
    )
    return document


def _verdicts(document: Document) -> list[Verdict]:
    own = document.get("relight", {}).get("resident", {})
    other = document.get("torchrun", {}).get("resident", {})
    found = []
    for role, line in own.items():
        # What plain DDP leaves behind is torch's; relight answers for what comes on top.
        beyond = max(0.0, other[role]["bytes_per_step"]) if role in other else 0.0
        note = f"± {line['error']:.1f}" + (f", of which torch alone {beyond:.1f}" if beyond else "")
        what = f"memory of {role} left behind by a step"
        found.append(Verdict(what, line["bytes_per_step"] - beyond, TARGET_BYTES_PER_STEP, "bytes", note))
    return found


def render(document: Document) -> str:
    """Markdown."""
    settings = document["settings"]
    rows = []
    for system in ("relight", "torchrun"):
        for role, line in document.get(system, {}).get("resident", {}).items():
            rows.append([f"{system}: {role}", *_line_cells(line)])
    for kind, line in document.get("relight", {}).get("files", {}).items():
        rows.append([f"relight: {kind} on disk", *_line_cells(line)])
    return "\n\n".join(
        [
            f"{settings['steps']} short steps on {settings['world_size']} workers with one standby. Slopes of the "
            f"least-squares lines after the first {settings['warm_up_steps']} steps.",
            markdown_table(["", "after the warm-up", "at the end", "bytes per step"], rows),
            f"The trace of phases is bounded: two files of at most {mebibytes(MAX_TRACE_BYTES)} each, the older one "
            "dropped.",
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *(f"Not measured: {text}" for text in document["not_measured"]),
        ]
    )


def _line_cells(line: dict[str, float]) -> list[str]:
    slope = f"{line['bytes_per_step']:+.1f} ± {line['error']:.1f}"
    return [mebibytes(line["first_bytes"]), mebibytes(line["last_bytes"]), slope]


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and files over many short steps")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"more than the warm-up of {WARM_UP_STEPS}")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.steps, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
