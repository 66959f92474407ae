"""The cost of a controller's death: killed (``kill -9``) at random moments, from the first second to the last.

Two kinds of job: one in which nothing else fails, and one whose workers are killed too, with the controller killed in
the middle of their recoveries. Each job has to end with the bits of an undisturbed job. A job without any
recovery has repeated no step; where workers die, each of their failures may repeat the step in flight, once, as it
would have done with the controller alive.

Run by ``python -m benchmarks.controller``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
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
from benchmarks.figures import markdown_table, spread, spread_cell
from benchmarks.jobs import Journal, RelightJob
from benchmarks.recovery.peers import JobFailed, trial_directory
from relight.wire.connection.address import find_address

WORLD_SIZE = 3
STEPS = 700
PAUSE_MS = 15
KILLS = 50  # of the controller, in each kind of job
KILLS_A_JOB = 8  # ten within a minute are taken for a defect, and end the job
WORKER_KILLS = (100, 250, 400, 550)
SEED = 20
JOB_DEADLINE_S = 240.0


def kill_controller(directory: Path, killed: set[int]) -> int | None:
    """SIGKILL the controller that serves now; returns the moment, or None if there is none but those killed before."""
    for private_dir in directory.glob("relight-*"):
        address = find_address(private_dir)
        if address is not None and address.pid not in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(address.pid, signal.SIGKILL)
                killed.add(address.pid)
                return time.monotonic_ns()
    return None


def run_job(workdir: Path, draw: random.Random, kills: int, *, workers_die: bool) -> dict[str, Any]:
    """One job whose controller is killed `kills` times, or until it ends. Raises JobFailed if it does not survive."""
    ranks = [draw.randrange(WORLD_SIZE) for _ in WORKER_KILLS] if workers_die else []
    places = [draw.choice(("FORWARD", "BACKWARD", "BARRIER", "OPTIMIZER")) for _ in ranks]
    sentences = [
        f"kill rank {rank} in {place} of step {step}"
        for rank, place, step in zip(ranks, places, WORKER_KILLS[: len(ranks)], strict=True)
    ]
    flags = tuple(word for sentence in sentences for word in ("--chaos", sentence))
    with trial_directory(workdir) as directory:
        arguments = ("benchmarks.tiny_ddp", "--steps", str(STEPS), "--pause-ms", str(PAUSE_MS))
        job = RelightJob(directory, *arguments, world_size=WORLD_SIZE, flags=flags)
        killed: set[int] = set()
        moments_ns: list[int] = []
        journal = Journal(job.run_dir)
        try:
            job.start()
            end = time.monotonic() + JOB_DEADLINE_S
            while len(moments_ns) < kills and job.exited() is None and time.monotonic() < end:
                _wait_for_moment(job, journal, draw, workers_die=workers_die)
                moment_ns = kill_controller(directory, killed)
                if moment_ns is not None:
                    moments_ns.append(moment_ns)
            job.await_end(JOB_DEADLINE_S)
        finally:
            job.stop()
        if kills and not moments_ns:
            raise JobFailed("there was no controller to be killed")
        journal.poll()
        report = job.report()
        back_ns = [entry.t_ns for entry in journal.of("ControllerRestarted")]
        absent_s = [
            (min(after) - moment_ns) / 1e9
            for moment_ns in moments_ns
            if (after := [back for back in back_ns if back > moment_ns])
        ]
        return {
            "kills": len(moments_ns),
            "digest": report.final_state_digest,
            "steps": report.steps,
            "steps_repeated": report.steps_repeated,
            "failures": len(report.failures),
            "recoveries": len(report.recoveries),
            "recoveries_begun_again": sum(recovery.restarts > 0 for recovery in report.recoveries),
            "absent_s": [round(seconds, 6) for seconds in absent_s],
        }


def _wait_for_moment(job: RelightJob, journal: Journal, draw: random.Random, *, workers_die: bool) -> None:
    """Somewhere in the next seconds; if workers die, mostly within the milliseconds after the next order to stop."""
    if not workers_die or draw.random() < 0.3:
        time.sleep(draw.uniform(0.0, 2.5))
        return
    journal.poll()
    before = len(journal.of("Stop"))
    while len(journal.of("Stop")) == before and job.exited() is None:
        time.sleep(0.0005)
        journal.poll()
    time.sleep(draw.uniform(0.0, 0.03))


def run(kills: int, workdir: Path) -> Document:
    """Jobs of both kinds, until there have been so many kills of the controller in each."""
    document = start_document("controller", world_size=WORLD_SIZE, steps=STEPS, kills=kills, seed=SEED)
    progress = Progress(2 * kills)
    undisturbed = run_job(workdir, random.Random(SEED), 0, workers_die=False)
    rows = []
    for workers_die in (False, True):
        draw = random.Random(f"{SEED} {workers_die}")
        jobs: list[dict[str, Any]] = []
        lost: list[str] = []
        while (done := sum(job["kills"] for job in jobs)) < kills and len(lost) < 3:
            try:
                jobs.append(run_job(workdir, draw, min(KILLS_A_JOB, kills - done), workers_die=workers_die))
            except JobFailed as error:
                lost.append(str(error))
                progress.skipped(str(error))
                continue
            for _ in range(jobs[-1]["kills"]):
                progress.done(f"{jobs[-1]['kills']} kills, {jobs[-1]['steps_repeated']} steps repeated")
        rows.append(_row(workers_die, jobs, lost, undisturbed["digest"]))
    document["rows"] = rows
    document["headline"] = headline(rows)
    verdicts = []
    for row in rows:
        note = f"{row['survived']} of {row['kills']} kills survived"
        verdicts.append(
            Verdict(f"steps lost by the controller's death ({row['what']})", row["steps_lost"], 0, "", note)
        )
        verdicts.append(Verdict(f"jobs with other bits ({row['what']})", row["other_bits"], 0, ""))
    add_verdicts(document, verdicts)
    return document


def _row(workers_die: bool, jobs: list[dict[str, Any]], lost: list[str], digest: str) -> dict[str, Any]:
    kills = sum(job["kills"] for job in jobs)
    absent_s = [seconds for job in jobs for seconds in job["absent_s"]]
    return {
        "what": "workers die too" if workers_die else "nothing else fails",
        "jobs": len(jobs),
        "jobs_lost": lost,
        "kills": kills + len(lost),
        "survived": kills,
        # A worker's failure may cost the step in flight, whether or not there is a controller.
        "steps_lost": sum(max(0, job["steps_repeated"] - job["failures"]) for job in jobs) + len(lost) * STEPS,
        "steps_repeated": sum(job["steps_repeated"] for job in jobs),
        "failures": sum(job["failures"] for job in jobs),
        "recoveries": sum(job["recoveries"] for job in jobs),
        "recoveries_begun_again": sum(job["recoveries_begun_again"] for job in jobs),
        "other_bits": sum(job["digest"] != digest for job in jobs),
        "absent_s": absent_s,
        "absent": spread(absent_s),
    }


def headline(rows: list[dict[str, Any]]) -> str:
    """The result in a sentence."""
    kills, survived = (sum(row[name] for row in rows) for name in ("kills", "survived"))
    lost = sum(row["steps_lost"] for row in rows)
    return f"{survived} of {kills} kills of the controller survived, {lost} steps lost by them."


def render(document: Document) -> str:
    """Markdown."""
    settings = document["settings"]
    rows = [
        [
            row["what"],
            str(row["jobs"]),
            f"{row['survived']} of {row['kills']}",
            str(row["steps_lost"]),
            str(row["failures"]),
            f"{row['recoveries']} ({row['recoveries_begun_again']})",
            str(row["steps_repeated"]),
            str(row["other_bits"]),
            spread_cell(row["absent"]),
        ]
        for row in document["rows"]
    ]
    header = [
        *("jobs in which", "jobs", "kills of the controller survived", "steps lost by them", "workers that failed"),
        *("recoveries (begun again)", "steps repeated for workers", "jobs with other bits"),
        "without a controller, median / p95 / greatest",
    ]
    parts = [
        f"{settings['world_size']} workers with a small model, {settings['steps']} steps a job, `kill -9` of the "
        f"controller at random moments (seed {settings['seed']}), up to {KILLS_A_JOB} in a job. A lost job would count "
        "with all its steps.",
        markdown_table(header, rows),
        markdown_table(["target", "at most", "measured", "met"], verdict_rows(document)),
    ]
    parts += [f"Lost: {text}" for row in document["rows"] for text in row["jobs_lost"]]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the death of the controller costs")
    parser.add_argument("--kills", type=int, default=KILLS, help="in each kind of job")
    parser.add_argument("--output", type=Path, default=RESULTS / "controller.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relight-bench-") as workdir:
        document = run(options.kills, Path(workdir))
    write_document(document, render, options.output)


if __name__ == "__main__":
    command(main)
