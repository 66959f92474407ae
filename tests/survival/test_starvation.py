"""A slow machine, or a slow rank, is not a failure."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.survival.harness import PATIENCE, Bench, Training, send
from tests.survival.judge import check_survived


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Take processors away from everyone else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize(
    ("steps", "hang_seconds"), [(100, 5.0), pytest.param(600, 1.0, marks=pytest.mark.all)], ids=["short", "long"]
)
def test_four_workers_and_two_busy_loops(bench: Bench, steps: int, hang_seconds: float) -> None:
    """No process is declared lost, though every one waits for a processor most of the time."""
    training = Training(ranks=4, steps=steps)
    with busy_loops(2):
        outcome = bench.run(
            training,
            flags=("--hang-timeout-seconds", str(hang_seconds), "--outside-hang-timeout-seconds", str(hang_seconds)),
            deadline_seconds=250 * PATIENCE,
        )
    assert outcome.status == 0, outcome.describe()
    assert not outcome.report.failures, outcome.describe()
    assert not outcome.report.recoveries, outcome.describe()
    assert outcome.report.final_version == steps


@pytest.mark.all
@pytest.mark.parametrize("name", ["w1", "w0"])
def test_a_rank_that_runs_half_of_the_time(bench: Bench, name: str) -> None:
    """Stopped for 0.3 s, running for 0.3 s, again and again: a straggler, no failure."""
    training = Training(steps=60, arguments=("--pause", "0.05", "--tell"))
    with bench.start(training, standbys=1) as job:
        job.wait_until(lambda: "committed 2" in job.output(), "the first steps are committed")
        victim = job.workers()[name]
        rounds = 0
        while job.launcher.poll() is None and rounds < 200 * PATIENCE:
            rounds += 1
            send(victim, signal.SIGSTOP)
            time.sleep(0.3)
            send(victim, signal.SIGCONT)
            time.sleep(0.3)
        outcome = job.wait()
    assert rounds > 6, "the job was over before it could be disturbed"
    assert not outcome.report.failures, outcome.describe()
    check_survived(outcome, bench.reference(training))
