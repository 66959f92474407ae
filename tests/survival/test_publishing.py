"""Engines beside a job that fails: they get every version whole, and at the end exactly the trainer's weights."""

import dataclasses
from collections.abc import Sequence

import pytest

import relight
from tests.programs.train import Net
from tests.survival.harness import DEADLINE_SECONDS, Bench, Training
from tests.survival.judge import check_survived

STEPS = 12
TRAINING = Training(steps=STEPS, arguments=("--batchnorm", "--publish", "2"))


@pytest.mark.parametrize(
    "faults",
    [
        (),
        ("kill rank 0 in BACKWARD of step 5",),
        ("kill rank 1 in OPTIMIZER of step 5",),
        pytest.param(("kill rank 0 in OPTIMIZER of step 4",), marks=pytest.mark.all),
        pytest.param(("freeze rank 0 in BARRIER of step 6",), marks=pytest.mark.all),
        pytest.param(("kill rank 0 after step 4", "kill rank 0 in FORWARD of step 9"), marks=pytest.mark.all),
    ],
    ids=lambda faults: " and ".join(faults) or "undisturbed",
)
def test_an_engine_ends_with_the_trainers_weights(bench: Bench, faults: Sequence[str]) -> None:
    reference = bench.reference(TRAINING)
    model = Net(64, 0.1, True)
    seen: list[tuple[int, int]] = []
    with (
        bench.start(TRAINING, faults=faults, standbys=2) as job,
        relight.Receiver(job.run_dir, model=model) as receiver,
    ):
        while job.launcher.poll() is None and not receiver.wait_for(STEPS, 0.02):
            with receiver.serving() as version:
                seen.append((receiver.generation, version))
        outcome = job.wait(DEADLINE_SECONDS)
        digest = receiver.digest()
    check_survived(outcome, reference)
    assert digest == outcome.finals[0]["weights"]
    assert receiver.version == STEPS
    assert seen == sorted(seen)


def test_publishing_changes_no_bit(bench: Bench) -> None:
    plain = bench.reference(dataclasses.replace(TRAINING, arguments=("--batchnorm",)))
    assert bench.reference(TRAINING).finals == plain.finals


def test_a_job_without_engines_does_not_wait_for_any(bench: Bench) -> None:
    outcome = bench.run(TRAINING, faults=["kill rank 0 in BACKWARD of step 5"])
    check_survived(outcome, bench.reference(TRAINING))
    assert not (outcome.run_dir / "weights.sock").exists()
