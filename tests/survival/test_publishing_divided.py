"""Engines beside a job whose weights are divided over its ranks: whole tensors, with the bits of `full_tensor`.

All of it is marked `all`; what runs always is the same with sources in one process (tests/transfer/test_division.py).
"""

import argparse
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import relight
from tests.programs.divided import Net
from tests.programs.pipeline import build
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
    given = [f"--{kind}" in training.arguments for kind in ("batchnorm", "embed", "counters")]
    return Net(WIDTH, hidden, 0.1, *given)


def pipeline_of(layout: str, *arguments: str) -> Training:
    ranks = 8 if layout == "tp" else 4
    arguments = ("--layout", layout, "--publish", "2", *arguments)
    return Training(ranks=ranks, steps=STEPS, program="pipeline.py", arguments=arguments)


def whole_pipeline(training: Training) -> nn.Module:
    """As an engine has it: all stages, of other values."""
    stages = 4 if {"none", "interleaved"} & set(training.arguments) else 2
    options = argparse.Namespace(width=WIDTH, dropout=0.1, batchnorm="--batchnorm" in training.arguments)
    model = nn.ModuleDict({f"stage{index}": build(index, stages, options) for index in range(stages)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


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
        ("tp_dp", ("--counters",), ()),
        ("tp_dp", ("--counters",), ("kill rank 1 in BACKWARD of step 5", "kill rank 2 in OPTIMIZER of step 8")),
        ("tp_fsdp", ("--counters", "--batchnorm"), ()),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "-",
)
def test_an_engine_ends_with_the_trainers_weights(
    bench: Bench, layout: str, arguments: Sequence[str], faults: Sequence[str]
) -> None:
    training = training_of(layout, *arguments)
    check_engine(bench, training, model_of(training), faults)


@pytest.mark.all
@pytest.mark.parametrize(
    ("layout", "arguments", "faults"),
    [
        ("replicate", "", ("kill rank 2 in BACKWARD of step 5",)),
        ("replicate", "--schedule interleaved", ("kill rank 0 in OPTIMIZER of step 4",)),
        ("ddp", "", ("kill rank 3 in OPTIMIZER of step 5", "kill rank 2 in FORWARD of step 8")),
        ("ddp", "--batchnorm", ("freeze rank 1 in FORWARD of step 6",)),
        ("ddp", "--batchnorm --schedule interleaved", ()),
        ("fsdp", "--schedule gpipe", ()),
        ("fsdp", "--buddy 2", ("kill rank 3 in FORWARD of step 7",)),
        ("none", "", ()),
        ("none", "--buddy 2", ("kill rank 2 in BACKWARD of step 7",)),
        ("tp", "", ("kill rank 5 in BARRIER of step 4",)),
        ("tp", "--batchnorm", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "-",
)
def test_an_engine_gets_all_stages(bench: Bench, layout: str, arguments: str, faults: Sequence[str]) -> None:
    training = pipeline_of(layout, *arguments.split())
    check_engine(bench, training, whole_pipeline(training), faults)


@pytest.mark.all
def test_stages_with_tensors_of_one_name_are_refused(bench: Bench) -> None:
    """Not taken for replicas of each other; and training goes on."""
    training = pipeline_of("ddp", "--same-names")
    with bench.start(training) as job, relight.Receiver(job.run_dir, load=list) as receiver:
        outcome = job.wait(DEADLINE_SECONDS)
        assert receiver.version == -1
    assert outcome.status == 0, outcome.describe()
    assert "two stages of the pipeline have a tensor named" in outcome.stderr
    assert "training.publish(rename=...)" in outcome.stderr


def check_engine(bench: Bench, training: Training, model: nn.Module, faults: Sequence[str]) -> None:
    arguments = training.arguments
    reference = bench.reference(training)
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
        assert [recovery.tier for recovery in outcome.report.recoveries] == ["buddy memory"]
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
