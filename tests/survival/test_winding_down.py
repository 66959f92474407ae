"""SIGTERM to a job that keeps checkpoints: one more step, a checkpoint of it, and the end. Started again it goes on."""

import signal
from pathlib import Path

import pytest

from relight.training.checkpoint.files import published
from tests.survival.harness import Bench, Job, Training
from tests.survival.judge import check_protocol

STEPS = 40
EVERY = 1000  # far beyond the end: only the last checkpoint is ever due


def keeping(root: Path, *arguments: str) -> Training:
    more = ("--checkpoint", str(root), "--checkpoint-every", str(EVERY), "--pause", "0.02", *arguments)
    return Training(steps=STEPS, arguments=more)


def stop(job: Job, root: Path) -> int:
    """Send SIGTERM to `relight run` while it trains; returns the version at which it stopped."""
    job.wait_until(lambda: '"Begin"' in job.journal(), "training began")
    job.launcher.send_signal(signal.SIGTERM)
    outcome = job.wait()
    assert outcome.status == 128 + signal.SIGTERM, outcome.describe()
    (version,) = published(root)
    assert f"stopped: SIGTERM, after {version} of {STEPS} steps. Start the same command again" in outcome.report.error
    assert not check_protocol(outcome), outcome.describe()
    assert not outcome.finals  # the script did not go on behind its loop
    return version


def go_on(bench: Bench, root: Path, version: int, *arguments: str) -> None:
    again = bench.run(keeping(root, *arguments), standbys=0)
    assert again.status == 0, again.describe()
    assert f"training goes on from the checkpoint of step {version}" in again.stderr, again.describe()
    reference = bench.reference(Training(steps=STEPS, arguments=arguments))
    assert again.finals == reference.finals, again.describe()


def test_a_job_that_was_told_to_end_goes_on_where_it_stopped(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with bench.start(keeping(root, "--dropout", "0.5"), standbys=0) as job:
        version = stop(job, root)
    assert 0 < version < STEPS
    go_on(bench, root, version, "--dropout", "0.5")


@pytest.mark.all
@pytest.mark.parametrize(
    "fault", ["kill rank 1 in BEFORE_BARRIER", "kill rank 0 in BARRIER", "kill rank 2 in OPTIMIZER"]
)
def test_a_failure_on_the_way_does_not_keep_it_from_that(bench: Bench, tmp_path: Path, fault: str) -> None:
    """Each of the first steps has one: most likely the last step too, whichever that is."""
    root = tmp_path / "checkpoints"
    faults = [f"{fault} of step {step}" for step in range(3)]
    with bench.start(keeping(root), faults=faults, standbys=3) as job:
        version = stop(job, root)
    go_on(bench, root, version)


@pytest.mark.all
def test_without_checkpoints_it_ends_at_once(bench: Bench) -> None:
    with bench.start(Training(steps=STEPS, arguments=("--pause", "0.1")), standbys=0) as job:
        job.wait_until(lambda: '"Begin"' in job.journal(), "training began")
        job.launcher.send_signal(signal.SIGTERM)
        outcome = job.wait()
    assert (outcome.status, outcome.report.error) == (128 + signal.SIGTERM, "stopped: SIGTERM"), outcome.describe()


@pytest.mark.all
def test_the_controller_may_die_meanwhile(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with bench.start(keeping(root, "--hold-at", "3"), standbys=0) as job:
        job.wait_until(lambda: '"Begin"' in job.journal(), "training began")
        job.launcher.send_signal(signal.SIGTERM)
        job.wait_until(lambda: '"WindDown"' in job.journal(), "the ranks were told")
        controller = job.module("relight.server")
        assert controller is not None
        controller.kill()
        job.release()
        outcome = job.wait()
    assert outcome.status == 128 + signal.SIGTERM, outcome.describe()
    assert len(published(root)) == 1, outcome.describe()
