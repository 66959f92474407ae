"""Whole jobs on the late device: how they are run, and what must be true of them.

Each job draws an order of its streams of its own. No job may have a race: two operations of the device on the same
memory that nothing orders, however the job ended.
"""

import dataclasses
import zlib
from collections.abc import Sequence

from tests.survival import device_cases
from tests.survival.device_cases import Case, check_outcome
from tests.survival.harness import Bench, Outcome, Training

RACES = "races"  # the file with one line for each race, in a job's directory
LAZY = -1  # microseconds that the device is late: it does only what the host waits for


def late(training: Training) -> Training:
    """Return the same training on the late device."""
    return dataclasses.replace(training, is_late=True)


CASES = {name: dataclasses.replace(case, training=late(case.training)) for name, case in device_cases.CASES.items()}


def ddp(*arguments: str) -> Training:
    return late(device_cases.ddp(*arguments))


def run(
    bench: Bench,
    training: Training,
    *,
    faults: Sequence[str] = (),
    flags: Sequence[str] = (),
    devices: int = 0,
    bug: str = "",
    microseconds: int | None = None,
) -> Outcome:
    """Run a job with a seed of its own, the same each time; `bug`: of tests.device_extension.planted."""
    seed = zlib.crc32(repr((training, faults, devices)).encode()) % 1000
    environment = {"LATE_DEVICES": str(devices or training.ranks), "LATE_SEED": str(seed), "LATE_RACES": RACES}
    if bug:
        environment["LATE_BUG"] = bug
    if microseconds is not None:
        environment["LATE_MICROSECONDS"] = str(microseconds)
    return bench.run(training, faults=faults, flags=flags, standbys=1 if faults else 0, environment=environment)


def races_of(outcome: Outcome) -> str:
    """The races that the devices of a job have reported, one a line."""
    path = outcome.run_dir.parent / RACES
    return path.read_text() if path.exists() else ""


def reference(bench: Bench, case: Case) -> Outcome:
    """Return the end of the undisturbed job; computed once in a session."""
    known = bench.references.get(case.training)
    if known is None:
        known = bench.references[case.training] = run(bench, case.training, flags=case.flags)
        assert known.status == 0, known.describe()
        assert not known.report.failures, known.describe()
        assert not races_of(known), races_of(known)
    return known


def check(bench: Bench, case: Case, *faults: str, devices: int = 0, microseconds: int | None = None) -> Outcome:
    """Run the job with faults: it ends as one without, and without a race."""
    undisturbed = reference(bench, case)
    outcome = run(
        bench,
        case.training,
        faults=faults,
        flags=case.flags,
        devices=devices or case.devices(),
        microseconds=microseconds,
    )
    assert not races_of(outcome), races_of(outcome)
    check_outcome(case, faults, outcome, undisturbed)
    return outcome
