"""Engines beside a job whose weights are divided over its ranks: whole tensors, with the bits of `full_tensor`.

All of it is marked `all`; what runs always is the same with sources in one process (tests/transfer/test_division.py).
"""

from collections.abc import Sequence

import pytest
import torch

import relight
from tests.programs.divided import Net
from tests.survival.harness import DEADLINE_SECONDS, Bench, Training
from tests.survival.judge import check_protocol, check_survived

STEPS = 12
WIDTH = 48


def training_of(layout: str, *arguments: str) -> Training:
    ranks = 8 if layout == "tp_hsdp" else 4
    return Training(
        ranks=ranks, steps=STEPS, program="divided.py", arguments=("--layout", layout, "--publish", "2", *arguments)
    )


def model_of(training: Training) -> Net:
    """As an engine has it: whole, and of other values."""
    hidden = 2 * WIDTH + ("tp" not in training.arguments[1])
    torch.manual_seed(7)
    return Net(WIDTH, hidden, 0.1, "--batchnorm" in training.arguments, "--embed" in training.arguments)


@pytest.mark.all
@pytest.mark.parametrize(
    ("layout", "arguments", "faults"),
    [
        ("hsdp", ("--embed",), ("kill rank 1 in BACKWARD of step 5",)),
        ("hsdp", ("--embed", "--batchnorm"), ()),
        ("hsdp", (), ("kill rank 0 in OPTIMIZER of step 4",)),
        ("hsdp", (), ("freeze rank 3 in FORWARD of step 6",)),
        ("hsdp", ("--embed",), ("kill rank 2 in BARRIER of step 6", "kill rank 0 in FORWARD of step 9")),
        ("fsdp", ("--embed",), ()),
        ("fsdp", ("--buddy", "2"), ("kill rank 2 in FORWARD of step 7",)),
        ("tp_dp", (), ("kill rank 3 in OPTIMIZER of step 5",)),
        ("tp_dp", ("--batchnorm",), ()),
        ("tp_fsdp", (), ()),
        ("tp_hsdp", (), ("kill rank 1 in BACKWARD of step 4",)),
        ("zero_dp", (), ()),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "-",
)
def test_an_engine_ends_with_the_trainers_weights(
    bench: Bench, layout: str, arguments: Sequence[str], faults: Sequence[str]
) -> None:
    training = training_of(layout, *arguments)
    reference = bench.reference(training)
    model = model_of(training)
    seen: list[tuple[int, int]] = []
    with (
        bench.start(training, faults=faults, standbys=2) as job,
        relight.Receiver(job.run_dir, model=model) as receiver,
    ):
        while job.launcher.poll() is None and not receiver.wait_for(STEPS, 0.02):
            with receiver.serving() as version:
                seen.append((receiver.generation, version))
        outcome = job.wait(DEADLINE_SECONDS)
        digest = receiver.digest()
    if "--buddy" in arguments:  # several steps are repeated
        assert [recovery.rung for recovery in outcome.report.recoveries] == ["buddy memory"]
        assert outcome.finals == reference.finals
        assert not check_protocol(outcome), outcome.describe()
    else:
        check_survived(outcome, reference)
    assert receiver.version == STEPS, outcome.describe()
    assert digest == outcome.finals[0]["weights"]
    assert seen == sorted(seen) or "--buddy" in arguments
    published = outcome.report.published
    assert published is not None
    assert list(published.engines.values()) == [STEPS]
