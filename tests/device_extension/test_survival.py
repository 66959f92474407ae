"""Whole jobs on the late device: killed, frozen, broken, and compared bit for bit with an undisturbed one.

Each job draws another order of its streams.
"""

import zlib

import pytest

from tests.device_extension.build import is_built
from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_faults, check_survived

pytestmark = [pytest.mark.late, pytest.mark.skipif(not is_built(), reason="not built: make test-device")]

ENDS = ("kill", "freeze", "raise")
PLACES = ("FORWARD", "BACKWARD", "BARRIER", "OPTIMIZER")
WARM, LEAN = "3", "2"  # devices for two ranks and a standby


def run(bench: Bench, training: Training, *, faults: tuple[str, ...] = (), devices: str = WARM) -> Outcome:
    """Run a job with a seed of its own, the same each time."""
    seed = zlib.crc32(repr((training, faults, devices)).encode()) % 1000
    environment = {"LATE_DEVICES": devices, "LATE_SEED": str(seed)}
    return bench.run(training, faults=faults, standbys=1 if faults else 0, environment=environment)


def check(bench: Bench, training: Training, *faults: str, devices: str = WARM) -> Outcome:
    """A job with faults ends as one without."""
    undisturbed = bench.references.get(training)
    if undisturbed is None:
        undisturbed = bench.references[training] = run(bench, training, devices=str(training.ranks))
        assert undisturbed.status == 0, undisturbed.describe()
    outcome = run(bench, training, faults=faults, devices=devices)
    check_survived(outcome, undisturbed)
    check_faults(outcome, faults)
    return outcome


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_is_replaced(bench: Bench, end: str, place: str) -> None:
    check(bench, Training(ranks=2, is_late=True), f"{end} rank 1 in {place} of step 3")


def test_a_standby_without_a_device_takes_that_of_the_rank(bench: Bench) -> None:
    faults = ("kill rank 1 in BACKWARD of step 2", "kill rank 0 in OPTIMIZER of step 4")
    outcome = check(bench, Training(ranks=2, is_late=True), *faults, devices=LEAN)
    assert "it builds its modules only when it takes a rank" in outcome.stderr


def test_what_people_write(bench: Bench) -> None:
    arguments = ("--scaler", "--overflow-at", "2", "--clip", "--optimizer", "adamw-fused", "--ema", "--batchnorm")
    check(
        bench,
        Training(ranks=2, is_late=True, arguments=arguments),
        "kill rank 0 in BACKWARD of step 2",
        "kill rank 1 in OPTIMIZER of step 5",
    )


def test_too_few_devices_are_refused_before_the_first_step(bench: Bench) -> None:
    outcome = run(bench, Training(ranks=2, is_late=True), devices="1")
    assert outcome.status != 0
    assert "2 ranks and 0 standbys have 1 devices of type 'late'" in outcome.stdout + outcome.stderr
