"""Nothing may grow with the number of steps: memory and files of a job over ten thousand short steps.

Resident memory of every process is read from /proc while the job trains, with the number of steps done at that
moment. The slope of the least-squares line after the warm-up says how much each step leaves. The same script under
torchrun shows how much torch itself leaves. Files in the run directory are followed too: the trace of phases grows
up to a bound, everything else must not.

Nor may the controller's memory grow with the number of failures. Thousands of them take days with real workers, so
those are pretended (`agents_crowd.py`): the real controller, over its real sockets, hears of one death after the other
and leads every recovery. Then it is killed, and its successor reads the whole journal.

Run by ``python -m benchmarks.memory``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agents_crowd import Crowd
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
from benchmarks.recovery.peers import REPOSITORY, JobFailed, trial_directory
from benchmarks.tiny_ddp import PROGRESS
from relight.launch.private_dir import make_private_dir
from relight.server.records.trace import MAX_TRACE_BYTES
from relight.wire.connection.address import read_address
from relight.wire.settings import JobSettings

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
FAILURES = 6_000
CROWD_RANKS = 4
SETTLED_FAILURES = 2_000  # what is counted for limits is full after 256 different failures; the allocator needs longer
TARGET_BYTES_PER_FAILURE = 128.0
ROOM_FOR_LIMITS = 10**9
START_DEADLINE_S = 60.0


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


def measure_failures(failures: int, workdir: Path) -> dict[str, Any]:
    """The controller's memory over so many recoveries, and that of its successor."""
    run_dir = workdir / "failures"
    run_dir.mkdir()
    settings = JobSettings(
        job="crowd",
        script="nothing.py",
        world_size=CROWD_RANKS,
        standbys=1,
        run_dir=str(run_dir),
        max_failures_per_step=ROOM_FOR_LIMITS,
    )
    token = secrets.token_bytes(32)
    private_dir = make_private_dir(settings, token)
    try:
        with _controller(private_dir) as process:
            found = asyncio.run(_fail_again_and_again(process, private_dir, token, failures))
        found["journal_bytes"] = (run_dir / "journal.jsonl").stat().st_size
        begun = time.monotonic()
        (private_dir / "controller.json").unlink()
        with _controller(private_dir, "--resume") as process:
            asyncio.run(_find(process, private_dir))
            found["replay_s"] = time.monotonic() - begun
            found["successor_bytes"] = process.memory_info().rss
    finally:
        shutil.rmtree(private_dir, ignore_errors=True)
    return found


@contextlib.contextmanager
def _controller(private_dir: Path, *flags: str) -> Iterator[psutil.Process]:
    process = psutil.Popen(
        [sys.executable, "-m", "relight.server", "--private-dir", private_dir, "--parent", str(os.getpid()), *flags],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def _find(process: psutil.Process, private_dir: Path) -> tuple[str, int]:
    end = time.monotonic() + START_DEADLINE_S
    while (address := read_address(private_dir)) is None:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE or time.monotonic() > end:
            raise JobFailed("the controller does not listen")
        await asyncio.sleep(0.01)
    return address


async def _fail_again_and_again(
    process: psutil.Process, private_dir: Path, token: bytes, failures: int
) -> dict[str, Any]:
    crowd = Crowd(await _find(process, private_dir), token, agents=1, ranks_each=CROWD_RANKS)
    await crowd.join()
    await crowd.until_training()
    points: list[tuple[int, int]] = []
    for number in range(failures):
        await crowd.until_standby()
        await crowd.fail(number % CROWD_RANKS, lambda: 0.0)
        crowd.version += 1
        if number % 50 == 0:
            points.append((number, process.memory_info().rss))
    crowd.close()
    settled = [point for point in points if point[0] >= min(SETTLED_FAILURES, failures // 2)]
    line = fit_line([x for x, _ in settled], [y for _, y in settled])
    return {
        "failures": failures,
        "points": points,
        "first_bytes": settled[0][1],
        "last_bytes": settled[-1][1],
        "bytes_per_failure": line.slope if line else 0.0,
        "error": line.slope_error if line else 0.0,
    }


def run(steps: int, failures: int, workdir: Path) -> Document:
    """relight, then torchrun; then the controller alone."""
    document = start_document(
        "memory", steps=steps, failures=failures, world_size=WORLD_SIZE, standbys=1, warm_up_steps=WARM_UP_STEPS
    )
    progress = Progress(3)
    document["not_measured"] = []
    for name, plain in (("relight", False), ("torchrun", True)):
        try:
            document[name] = measure(steps, workdir, plain=plain)
        except JobFailed as error:
            document["not_measured"].append(f"{name}: {error}")
            progress.skipped(document["not_measured"][-1])
            continue
        progress.done(f"{name}: {steps} steps, {document[name]['samples']} samples after the warm-up")
    try:
        document["failures"] = measure_failures(failures, workdir)
        progress.done(f"{failures} failures, {document['failures']['bytes_per_failure']:.0f} bytes each")
    except JobFailed as error:
        document["not_measured"].append(f"failures: {error}")
        progress.skipped(document["not_measured"][-1])
    add_verdicts(document, _verdicts(document))
    slopes = [line["bytes_per_step"] for line in document.get("relight", {}).get("resident", {}).values()]
    document["headline"] = (
        f"Over {steps} steps, no process of relight grows by more than {max(slopes, default=0.0):.1f} bytes per step."
    )
    one = document.get("failures")
    if one is not None:
        document["headline"] += (
            f" Over {one['failures']:,} failures the controller grows by {one['bytes_per_failure']:.0f} bytes for each."
        )
    return document


def _verdicts(document: Document) -> list[Verdict]:
    own = document.get("relight", {}).get("resident", {})
    other = document.get("torchrun", {}).get("resident", {})
    found = []
    for role, line in own.items():
        # The memory that plain DDP keeps is torch's; relight answers for what comes on top.
        beyond = max(0.0, other[role]["bytes_per_step"]) if role in other else 0.0
        note = f"± {line['error']:.1f}" + (f", of which torch alone {beyond:.1f}" if beyond else "")
        what = f"memory of {role} left by a step"
        found.append(Verdict(what, line["bytes_per_step"] - beyond, TARGET_BYTES_PER_STEP, "bytes", note))
    one = document.get("failures")
    if one is not None:
        what, note = "memory of controller left by a failure", f"± {one['error']:.1f}"
        found.append(Verdict(what, max(0.0, one["bytes_per_failure"]), TARGET_BYTES_PER_FAILURE, "bytes", note))
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
            *_failures(document),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
            *(f"Not measured: {text}" for text in document["not_measured"]),
            *document.get("notes", []),
        ]
    )


def _failures(document: Document) -> list[str]:
    one = document.get("failures")
    if one is None:
        return []
    return [
        f"**Failures**: {one['failures']:,}, one after the other, of {CROWD_RANKS} pretended ranks, each with its "
        f"recovery. The controller has {mebibytes(one['first_bytes'])} after the first "
        f"{min(SETTLED_FAILURES, one['failures'] // 2):,} and {mebibytes(one['last_bytes'])} in the end: "
        f"{one['bytes_per_failure']:+.1f} ± {one['error']:.1f} bytes for each, by the least-squares line. Its journal "
        f"has {one['journal_bytes'] / one['failures']:,.0f} bytes of each. Its successor, which reads all of that in "
        f"{one['replay_s']:.2f} s, has {mebibytes(one['successor_bytes'])}."
    ]


def _line_cells(line: dict[str, float]) -> list[str]:
    slope = f"{line['bytes_per_step']:+.1f} ± {line['error']:.1f}"
    return [mebibytes(line["first_bytes"]), mebibytes(line["last_bytes"]), slope]


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and files over many steps and failures")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"more than the warm-up of {WARM_UP_STEPS}")
    parser.add_argument("--failures", type=int, default=FAILURES, help=f"more than {2 * CROWD_RANKS}")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.steps, options.failures, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
