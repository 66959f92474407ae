"""Kills one rank of a running job at a time, and waits until all have recovered."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.jobs import START_DEADLINE_S, Journal, RelightJob, wait_until

RECOVERY_DEADLINE_S = 60.0


def await_calm(job: RelightJob, journal: Journal) -> None:
    """Until everyone trains and a standby is warm."""

    def calm() -> bool:
        journal.poll()
        return bool(journal.of("Begin")) and journal.ready_standbys() > 0

    wait_until(calm, START_DEADLINE_S, "a warm standby", job)


def kill_rank(job: RelightJob, journal: Journal, rank: int, *, generation: int, workers: int) -> tuple[int, int]:
    """Kill a rank and wait until all have committed a step again: when it was, and when the last one computed."""
    pid = journal.members()[rank]
    fault_ns = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)

    def recovered() -> bool:
        journal.poll()
        return len(journal.of("StepResumed", generation=generation)) == workers

    wait_until(recovered, RECOVERY_DEADLINE_S, f"the recovery of {workers} workers", job)
    resumed = journal.of("StepResumed", generation=generation)
    return fault_ns, max(entry.fields["forward_ns"] for entry in resumed)
