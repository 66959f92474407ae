"""Measures how relight recovers, in the same way as its peers, and where the time went.

The figures of a trial come from the event logs alone, as for every system. Its stages come from what relight
recorded: the *path* cuts the time from the kill to the last rank's first forward into pieces that follow one
another, by the moments at which facts reached the controller and orders left it; the *parts* are what the workers
report of the restore, which ranks do side by side.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.jobs import Journal, RelightJob
from benchmarks.recovery.peers import (
    TORCHFT_FAULT_STEPS,
    WORLD_SIZE,
    Trial,
    describe,
    plan_fault,
    run_trial,
    trial_directory,
)
from relight.core.account.report import JobReport, RecoveryReport

# Later than for torchft, whose groups all start at once: a standby starts beside the workers and warms up after them.
FAULT_STEPS = range(TORCHFT_FAULT_STEPS.start + 4, TORCHFT_FAULT_STEPS.stop + 4)

PATH = {
    "detect": "kill until the agent notices",
    "order": "until Stop is ordered",
    "stop": "until every survivor stands still",
    "replace": "until the replacement has the rank",
    "decide": "until Restore is ordered",
    "restore": "until every rank holds the state and the new group",
    "handshake": "until Resume is ordered",
    "resume": "until the last rank's next forward",
}
NOTICES = ("ProcessDying", "ProcessExited", "ProcessSuspected")
PARTS = ("finish", "reform", "copy", "digest", "rollback")


@dataclass(frozen=True)
class RelightTrial:
    """One kill, and what relight says about its recovery. Seconds; empty if there was no recovery."""

    trial: Trial
    path_s: dict[str, float]
    parts_s: dict[str, float]
    reported_s: dict[str, float | None]  # all stages of report.json
    moved_bytes: int = 0
    decision: str = ""
    replacement_kind: str = ""
    steps_repeated: int = 0
    standby_ready: bool = False  # at the time of the kill


def measure_relight(trials: int, seed: int, workdir: Path, standbys: int = 1) -> list[RelightTrial]:
    """Kill one rank of a job, with standbys or (0) with a fresh process as the replacement."""
    results = []
    for trial in range(trials):
        results.append(relight_trial(trial, seed, workdir, standbys))
        print(describe(results[-1].trial), flush=True)
    return results


def relight_trial(trial: int, seed: int, workdir: Path, standbys: int = 1) -> RelightTrial:
    """One of them."""
    system = "relight" if standbys else "relight, no standby"
    plan = plan_fault(system, seed, trial, FAULT_STEPS)
    with trial_directory(workdir) as directory:
        script = ("benchmarks.recovery.relight_ddp", "--log-dir", str(directory / "events"), "--seed", str(seed))
        job = RelightJob(directory, *script, world_size=WORLD_SIZE, standbys=standbys)
        measured = run_trial(job, system, seed, plan)
        journal = Journal(job.run_dir)
        journal.poll()
        return _with_stages(measured, job.report(), journal)


def _with_stages(trial: Trial, report: JobReport, journal: Journal) -> RelightTrial:
    if trial.raw is None or not report.recoveries:
        return RelightTrial(trial, {}, {}, {})
    recovery = report.recoveries[0]
    stages = msgspec.structs.asdict(recovery.stages)
    path = path_of(journal, recovery, trial.fault.t_ns, max(trial.raw.computing_ns.values()))
    before = [entry for entry in journal.of("StandbyReady") if entry.t_ns < trial.fault.t_ns]
    return RelightTrial(
        trial=trial,
        path_s=path,
        parts_s={name: stages[f"{name}_seconds"] for name in PARTS},
        reported_s=stages,
        moved_bytes=recovery.moved_bytes,
        decision=recovery.decision,
        replacement_kind=recovery.replacement_kind,
        steps_repeated=recovery.steps_repeated,
        standby_ready=bool(before),
    )


def path_of(journal: Journal, recovery: RecoveryReport, fault_ns: int, computing_ns: int) -> dict[str, float]:
    """Cut the time from the fault until every rank computes into the pieces of `PATH`, which add up to it."""
    generation = recovery.generation
    noticed = [e.fields["noticed_ns"] for kind in NOTICES for e in journal.of(kind)]
    noticed_ns = [t_ns for t_ns in noticed if t_ns > fault_ns]
    stopped = journal.of("Stopped", generation=generation)
    moments = [
        fault_ns,
        min(noticed_ns),
        journal.of("Stop", generation=generation)[0].t_ns,
        max(e.t_ns for e in stopped if not e.fields["blank"]),
        max(e.t_ns for e in stopped),
        journal.of("Restore", generation=generation)[0].t_ns,
        max(e.t_ns for e in journal.of("Restored", generation=generation)),
        journal.of("Resume", generation=generation)[0].t_ns,
        computing_ns,
    ]
    for index in range(1, len(moments)):  # a replacement may stand still before the last survivor does
        moments[index] = max(moments[index], moments[index - 1])
    pieces = (after - before for before, after in itertools.pairwise(moments))
    return {name: round(piece / 1e9, 6) for name, piece in zip(PATH, pieces, strict=True)}
