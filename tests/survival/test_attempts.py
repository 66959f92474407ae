"""Replacements that are killed one after the other: the job goes on as long as an intact rank lives."""

import signal

import pytest

from tests.survival.harness import PATIENCE, Bench, Job, Training, send
from tests.survival.judge import check_survived

STEPS = 12
TRAINING = Training(ranks=3, steps=STEPS, arguments=("--tell", "--pause", "0.2", "--hold-at", str(STEPS - 2)))
UNPAUSED = Training(ranks=3, steps=STEPS, arguments=("--tell",))


class Killer:
    """Kills the present holder of rank 1, or the process on the way to become it, by journal."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._killed: set[str] = set()

    def kill(self, when: str) -> None:
        """The next process that was not killed yet, as soon as the journal has `when` of it."""
        name = ""

        def is_there() -> bool:
            nonlocal name
            initial = {f"w{rank}" for rank in range(TRAINING.ranks)}
            fresh = sorted(set(self._job.workers()) - initial - self._killed)
            name = fresh[-1] if fresh else ""
            return bool(name) and self._has(when, name)

        self._job.wait_until(is_there, f"a replacement is there: {when}")
        self._killed.add(name)
        send(self._job.workers()[name], signal.SIGKILL)
        self._job.wait_until(lambda: self._has("ProcessExited", name), f"{name} is known dead")

    def _has(self, what: str, name: str) -> bool:
        return any(f'"{what}"' in line and f'"{name}"' in line for line in self._job.journal().splitlines())


@pytest.mark.all
@pytest.mark.timeout(600)
def test_a_replacement_is_killed_six_times_in_a_row(bench: Bench) -> None:
    """Twice while it starts, twice while it is restored, twice in its first step."""
    reference = bench.reference(UNPAUSED)
    with bench.start(TRAINING, standbys=0) as job:
        job.wait_until(lambda: "committed 3" in job.output(), "training has begun")
        send(job.workers()["w1"], signal.SIGKILL)
        killer = Killer(job)
        for when in ("ProcessStarted", "ProcessStarted", "Assign", "Assign", "Restored", "Restored"):
            killer.kill(when)
        job.wait_until(lambda: "recovered in" in job.messages(), "the job trains on")
        job.release()
        outcome = job.wait(300 * PATIENCE)
    check_survived(outcome, reference)
    said = [notice for notice in outcome.report.notices if "attempts in a row" in notice]
    assert len(said) == 1, outcome.describe()
    assert said[0].startswith("3 attempts in a row"), said
