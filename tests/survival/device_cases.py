"""Ways to train on a device, each with every way to end a rank: on a GPU, and on the late device of the tests."""

import dataclasses

from relight.chaos.plan import parse_fault
from tests.survival.harness import Outcome, Training
from tests.survival.judge import check_faults, check_survived, describe, expect
from tests.survival.test_fallback import check_came_back


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train on a device."""

    training: Training
    flags: tuple[str, ...] = ()
    recovers_from: str = ""  # where the state comes from, if not from other ranks
    rank: int = 1  # that is lost

    def devices(self) -> int:
        return self.training.ranks + 1


def divided(*arguments: str, ranks: int = 4) -> Training:
    return Training(ranks=ranks, program="divided.py", arguments=arguments)


def ddp(*arguments: str, ranks: int = 2) -> Training:
    return Training(ranks=ranks, arguments=arguments)


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


def check_outcome(case: Case, faults: tuple[str, ...], outcome: Outcome, undisturbed: Outcome) -> None:
    """The job with these faults ended as the one without."""
    if case.recovers_from:
        check_came_back(outcome, undisturbed, (case.recovers_from,) * len(faults))
        struck = [expect(parse_fault(fault)) for fault in faults]
        assert [describe(failure) for failure in outcome.report.failures] == struck, outcome.describe()
    else:
        check_survived(outcome, undisturbed)
        check_faults(outcome, faults)
