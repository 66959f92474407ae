"""Whole jobs on the late device: how they are run, and what must be true of them.

Each job draws an order of its streams of its own. No job may have a race: two operations of the device on the same
memory that nothing orders, however the job ended.
"""

import dataclasses
import zlib
from collections.abc import Sequence

from relight.chaos.plan import parse_fault
from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_faults, check_survived, describe, expect
from tests.survival.test_fallback import check_came_back

RACES = "races"  # the file with one line for each race, in a job's directory
LAZY = -1  # microseconds that the device is late: it does only what the host waits for


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train on the late device."""

    training: Training
    flags: tuple[str, ...] = ()
    recovers_from: str = ""  # where the state comes from, if not from other ranks
    rank: int = 1  # that is lost

    def devices(self) -> int:
        return self.training.ranks + 1


def divided(*arguments: str, ranks: int = 4) -> Training:
    return Training(ranks=ranks, is_late=True, program="divided.py", arguments=arguments)


def ddp(*arguments: str) -> Training:
    return Training(ranks=2, is_late=True, arguments=arguments)


CASES = {
    "ddp": Case(ddp()),
    "autocast-scaler": Case(ddp("--autocast", "--scaler", "--overflow-at", "2", "--clip")),
    "fused": Case(ddp("--optimizer", "adamw-fused", "--scaler", "--ema")),
    "foreach": Case(ddp("--optimizer", "adamw-foreach", "--batchnorm")),
    "own-stream": Case(ddp("--own-stream", "--batchnorm", "--clip", "--checkpoint", "checkpoints")),
    "verify": Case(ddp(), flags=("--verify-every", "2")),
    "checkpoint": Case(ddp("--batchnorm", "--local-buffers", "--checkpoint", "checkpoints")),
    "publish": Case(ddp("--batchnorm", "--publish", "2")),
    "hsdp": Case(divided()),
    "hsdp-mixed": Case(divided("--mixed", "--fused", "--clip")),
    "hsdp-verify": Case(divided(), flags=("--verify-every", "2")),
    "buddy": Case(
        divided("--layout", "fsdp", "--buddy", "2", "--pause", "0.03", ranks=2), recovers_from="buddy memory"
    ),
    "fsdp-checkpoint": Case(
        divided("--layout", "fsdp", "--checkpoint", "checkpoints", "--checkpoint-every", "2", ranks=2),
        recovers_from="checkpoint",
    ),
}


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
    if case.recovers_from:
        check_came_back(outcome, undisturbed, (case.recovers_from,) * len(faults))
        struck = [expect(parse_fault(fault)) for fault in faults]
        assert [describe(failure) for failure in outcome.report.failures] == struck, outcome.describe()
    else:
        check_survived(outcome, undisturbed)
        check_faults(outcome, faults)
    return outcome
