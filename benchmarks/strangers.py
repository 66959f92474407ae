"""The harm that strangers can do to a job: a flood of nonsense against it, while workers are killed.

The same job with the same kills, first left alone, then again and again under `benchmarks.flood` until the controller
has taken enough frames of it. Every job must end with the same state; the controller's memory must not grow; and
recovery may take longer only by the share of the machine that the flood itself takes.

Run by ``python -m benchmarks.strangers``.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import time
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
from benchmarks.figures import markdown_table, mebibytes, spread, spread_cell
from benchmarks.jobs import CONTROL_PLANE, RelightJob
from benchmarks.recovery.peers import JobFailed, trial_directory

FRAMES = 1_000_000
WORLD_SIZE = 3
STEPS = 900
FIRST_STEP, STEPS_BETWEEN = 60, 120
SAMPLE_S = 0.25
JOB_DEADLINE_S = 600.0
MAX_GROWTH_MIB = 16.0
MAX_RATIO = 3.0  # of the longest recovery under a flood to the longest of a job left alone


def kills() -> tuple[str, ...]:
    """Each rank in turn, in each phase in turn."""
    places = ("FORWARD", "BACKWARD", "BARRIER", "OPTIMIZER")
    steps = range(FIRST_STEP, STEPS - STEPS_BETWEEN // 2, STEPS_BETWEEN)
    return tuple(
        f"kill rank {index % WORLD_SIZE} in {places[index % len(places)]} of step {step}"
        for index, step in enumerate(steps)
    )


def measure(seed: int, workdir: Path, *, flooded: bool) -> dict[str, Any]:
    """One job from its start to its end."""
    flags = tuple(word for sentence in kills() for word in ("--chaos", sentence))
    with trial_directory(workdir) as directory:
        words = ("benchmarks.tiny_ddp", "--steps", str(STEPS), "--pause-ms", "20")
        job = RelightJob(directory, *words, world_size=WORLD_SIZE, standbys=1, flags=flags)
        flood: subprocess.Popen[str] | None = None
        memory: list[int] = []
        try:
            job.start()
            controller = _controller(job)
            if flooded:
                (host, port) = _address(controller)
                flood = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.flood", host, str(port), str(seed), _private_dir(controller)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            end = time.monotonic() + JOB_DEADLINE_S
            while job.exited() is None:
                if time.monotonic() > end:
                    raise JobFailed(f"{STEPS} steps were not done in {JOB_DEADLINE_S:g} s")
                try:
                    memory.append(controller.memory_info().rss)
                except psutil.NoSuchProcess:
                    pass  # it has just ended
                time.sleep(SAMPLE_S)
            job.await_end(1.0)
        finally:
            job.stop()
            said = _end(flood)
        report = job.report()
    return {
        "flooded": flooded,
        "digest": report.final_state_digest,
        "lineage": report.final_lineage,
        "failures": len(report.failures),
        "recovery_s": [recovery.stages.total_seconds for recovery in report.recoveries],
        "controller_bytes": [memory[len(memory) // 5], max(memory)] if memory else [0, 0],
        "answered": said.get("answered", {}),
        "wall_s": report.wall_seconds,
    }


def _controller(job: RelightJob) -> psutil.Process:
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        job.supervise()
        for process in psutil.Process(job.pid).children(recursive=True):
            try:
                if CONTROL_PLANE["controller"] in process.cmdline() and _listening(process):
                    return process
            except psutil.Error:
                continue
        time.sleep(0.05)
    raise JobFailed("the job has no controller")


def _listening(process: psutil.Process) -> list[Any]:
    return [c for c in process.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN]


def _address(process: psutil.Process) -> tuple[str, int]:
    address = _listening(process)[0].laddr
    return address.ip, address.port


def _private_dir(controller: psutil.Process) -> str:
    words: list[str] = controller.cmdline()
    return words[words.index("--private-dir") + 1]


def _end(flood: subprocess.Popen[str] | None) -> dict[str, Any]:
    if flood is None:
        return {}
    try:
        output, _ = flood.communicate(timeout=30.0)
        said: dict[str, Any] = json.loads(output)
        return said
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        return {}
    finally:
        if flood.poll() is None:
            flood.kill()
            flood.wait()


def run(frames: int, workdir: Path) -> Document:
    """One job left alone, then flooded ones until so many frames were taken."""
    document = start_document("strangers", world_size=WORLD_SIZE, steps=STEPS, kills=len(kills()))
    progress = Progress(1)
    alone = measure(0, workdir, flooded=False)
    flooded: list[dict[str, Any]] = []
    answered: collections.Counter[str] = collections.Counter()
    while answered.total() < frames:
        flooded.append(measure(len(flooded) + 1, workdir, flooded=True))
        if not sum(flooded[-1]["answered"].values()):
            raise JobFailed("the flood did not reach the controller")
        answered.update(flooded[-1]["answered"])
        print(f"{answered.total():,} of {frames:,} frames, {len(flooded)} jobs", flush=True)
    progress.done(f"{answered.total():,} frames")
    same = all((job["digest"], job["lineage"]) == (alone["digest"], alone["lineage"]) for job in flooded)
    growth = max(job["controller_bytes"][1] - job["controller_bytes"][0] for job in flooded)
    document["alone"] = alone
    document["flooded"] = flooded
    document["answered"] = dict(answered)
    document["same_state"] = same
    document["unplanned_failures"] = sum(job["failures"] - len(kills()) for job in flooded)
    longest = max(seconds for job in flooded for seconds in job["recovery_s"])
    ratio = longest / max(alone["recovery_s"])
    document["headline"] = (
        f"{answered.total():,} hostile frames in {sum(j['wall_s'] for j in flooded):.0f} s, during "
        f"{sum(len(j['recovery_s']) for j in flooded)} recoveries: {'the same' if same else 'ANOTHER'} final state, "
        f"{document['unplanned_failures']} failures that were not planned."
    )
    add_verdicts(
        document,
        [
            Verdict("jobs under a flood with another final state", float(not same), 0.0, ""),
            Verdict("failures under a flood that were not planned", float(document["unplanned_failures"]), 0.0, ""),
            Verdict("growth of the controller's memory under a flood", growth / 2**20, MAX_GROWTH_MIB, "MiB"),
            Verdict("longest recovery under a flood, by the longest of a job left alone", ratio, MAX_RATIO, ""),
        ],
    )
    return document


def render(document: Document) -> str:
    """Markdown."""
    rows = [
        [
            name,
            str(len(jobs)),
            str(sum(len(job["recovery_s"]) for job in jobs)),
            spread_cell(spread([seconds for job in jobs for seconds in job["recovery_s"]])),
            mebibytes(max(job["controller_bytes"][1] for job in jobs)),
        ]
        for name, jobs in (("left alone", [document["alone"]]), ("under the flood", document["flooded"]))
    ]
    kinds = [[kind, f"{count:,}"] for kind, count in sorted(document["answered"].items())]
    return "\n\n".join(
        [
            document["headline"],
            "A job of three workers in which ranks are killed. Meanwhile six strangers send nonsense on one connection "
            "after the other, eighty (more than may wait to be known) hold connections open and say nothing, and two "
            "peers who know the token say the same again and again, and end with nonsense. They, and the controller "
            "that answers them, take much of the machine's two cores: that is why recovery takes longer.",
            markdown_table(
                ["job", "runs", "recoveries", "failure to training again: median / p95 / max", "controller's memory"],
                rows,
            ),
            markdown_table(["what was sent", "frames"], kinds),
            markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A flood of nonsense against a live controller")
    parser.add_argument("--frames", type=int, default=FRAMES, help="to be taken in all")
    parser.add_argument("--output", type=Path, default=RESULTS / "strangers.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.frames, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
