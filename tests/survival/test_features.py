"""Features of published training scripts: each survives a failure in mid-training with the bits of none."""

from pathlib import Path

import pytest

from tests.survival.harness import Bench, Training, finals_under_torchrun
from tests.survival.judge import check_faults, check_survived

STEPS = 8  # two epochs of four batches
KILL = "kill rank 1 in BACKWARD of step 5"  # in the middle of the second epoch

# Each line alone; `test_features_together` runs what does not depend on one another in fewer jobs.
ALONE: dict[str, tuple[str, str]] = {
    "sgd": ("--optimizer sgd", KILL),
    "adam": ("--optimizer adam", KILL),
    "adamw_fused": ("--optimizer adamw-fused", KILL),
    "adamw_foreach": ("--optimizer adamw-foreach", KILL),
    "batchnorm_of_rank_0": ("--batchnorm", "kill rank 0 in BACKWARD of step 5"),
    "batchnorm_forward": ("--batchnorm", "freeze rank 2 in FORWARD of step 5"),
    "batchnorm_early": ("--batchnorm", "kill rank 0 in BACKWARD of step 1"),
    "batchnorm_of_each_rank": ("--batchnorm --local-buffers", KILL),
    "batchnorm_of_each_rank_after_write": ("--batchnorm --local-buffers", "kill rank 0 in OPTIMIZER of step 5"),
    "batchnorm_accumulated": ("--batchnorm --local-buffers --accumulate 2", "kill rank 0 in BACKWARD of step 3"),
    "static_graph": ("--ddp static", KILL),
    "static_graph_first_step": ("--ddp static", "kill rank 1 in BACKWARD of step 0"),
    "static_graph_after_write": ("--ddp static --dropout 0.5", "kill rank 0 in OPTIMIZER of step 5"),
    "unused_parameters": ("--ddp unused", KILL),
    "unused_parameters_first_step": ("--ddp unused", "freeze rank 0 in BACKWARD of step 0"),
    "unused_parameters_first_use": ("--ddp unused", "kill rank 0 in OPTIMIZER of step 0"),
    "unused_parameters_after_write": ("--ddp unused", "kill rank 2 in OPTIMIZER of step 6"),
    "bucket_view": ("--ddp view --clip", KILL),
    "small_buckets": ("--ddp small --batchnorm", "kill rank 0 in BARRIER of step 5"),
    "dropout": ("--dropout 0.5", "kill rank 2 in BEFORE_BARRIER of step 5"),
    "clip": ("--clip", KILL),
    "scheduler": ("--scheduler", "kill rank 0 in OPTIMIZER of step 5"),
    "scheduler_back": ("--scheduler", KILL),
    "autocast": ("--autocast", KILL),
    "scaler": ("--scaler --clip", KILL),
    "overflow_backward": ("--scaler --clip --overflow-at 5", "kill rank 1 in BACKWARD of step 5"),
    "overflow_barrier": ("--scaler --overflow-at 5", "kill rank 1 in BARRIER of step 5"),
    "overflow_write": ("--scaler --overflow-at 5", "kill rank 1 in OPTIMIZER of step 5"),
    "overflow_autocast": ("--scaler --autocast --clip --overflow-at 5", "freeze rank 0 in BEFORE_BARRIER of step 5"),
    "compile": ("--compile aot_eager --batchnorm", KILL),
    "compile_after_write": ("--compile aot_eager --scaler --clip", "kill rank 0 in OPTIMIZER of step 5"),
    "compile_handed_over": ("--compile aot_eager --hand-over-compiled", "kill rank 0 in FORWARD of step 5"),
    "late_standby": ("--late-standby --batchnorm --local-buffers", KILL),
    "late_standby_early": ("--late-standby", "kill rank 0 in OPTIMIZER of step 0"),
    "ema": ("--ema", "kill rank 0 in OPTIMIZER of step 5"),
    "ema_back": ("--ema", KILL),
    "ema_batchnorm_back": ("--ema --batchnorm", KILL),
    "ema_batchnorm_first_write": ("--ema --batchnorm --local-buffers", "kill rank 1 in OPTIMIZER of step 0"),
    "ema_batchnorm_after_write": ("--ema --batchnorm --local-buffers", "kill rank 1 in OPTIMIZER of step 5"),
    "ema_batchnorm_after_step": ("--ema --batchnorm --local-buffers --ema-every 3", "kill rank 0 after step 4"),
    "ema_buffers_back": ("--ema --ema-kind buffers --batchnorm", KILL),
    "ema_buffers_after_write": (
        "--ema --ema-kind buffers --batchnorm --ema-every 2",
        "kill rank 2 in OPTIMIZER of step 4",
    ),
    "ema_buffers_not_moved": (
        "--ema --ema-kind buffers --batchnorm --ema-every 2",
        "kill rank 2 in OPTIMIZER of step 5",
    ),
    "ema_by_hand_back": ("--ema --ema-kind by-hand --batchnorm", KILL),
    "ema_by_hand_after_write": (
        "--ema --ema-kind by-hand --batchnorm --ema-every 2",
        "kill rank 0 in OPTIMIZER of step 4",
    ),
    "ema_by_hand_not_moved": (
        "--ema --ema-kind by-hand --batchnorm --ema-every 2",
        "kill rank 1 in OPTIMIZER of step 5",
    ),
    "accumulate": ("--accumulate 2", "kill rank 1 in BACKWARD of step 3"),
    "accumulate_3": ("--accumulate 3 --clip", "kill rank 1 in FORWARD of step 3"),
    "evaluate": ("--evaluate", "kill rank 1 between steps at step 6"),
    "stateful": ("--data stateful", KILL),
    "stateful_after_write": ("--data stateful", "kill rank 0 in OPTIMIZER of step 6"),
    "stateful_new_epoch": ("--data stateful", "kill rank 0 after step 3"),
    "function": ("--data function", KILL),
    "loader_workers": ("--loader-workers 2", KILL),
    "preserve": ("--streams preserve", KILL),
    "preserve_evaluate": ("--streams preserve --evaluate", "kill rank 1 in BARRIER of step 6"),
    "preserve_stateful": ("--streams preserve --data stateful --evaluate", "kill rank 0 in OPTIMIZER of step 5"),
    "zero_first": ("--zero-first", KILL),
    "zero_first_accumulate": ("--zero-first --accumulate 2", "kill rank 0 in OPTIMIZER of step 4"),
}
TOGETHER: dict[str, tuple[str, str]] = {
    "sgd_clip_scheduler_zero_first": ("--optimizer sgd --clip --scheduler --zero-first", KILL),
    "fused_batchnorm_accumulate": (
        "--optimizer adamw-fused --batchnorm --local-buffers --accumulate 2",
        "kill rank 0 in BACKWARD of step 5",
    ),
    "adam_autocast_ema_preserve_evaluate": (
        "--optimizer adam --autocast --ema --ema-kind buffers --batchnorm --streams preserve --evaluate",
        "kill rank 1 in OPTIMIZER of step 6",
    ),
    "static_graph_ema_clip": ("--ddp static --ema --clip", "kill rank 0 in BACKWARD of step 5"),
    "unused_parameters_scheduler": ("--ddp unused --scheduler", "kill rank 1 in OPTIMIZER of step 6"),
    "foreach_overflow_stateful": (
        "--optimizer adamw-foreach --scaler --clip --overflow-at 5 --data stateful",
        "kill rank 1 in OPTIMIZER of step 5",
    ),
    "several_sources_batchnorm_evaluate": ("--several-sources --batchnorm --local-buffers --evaluate", KILL),
    "function_dropout_batchnorm": ("--data function --dropout 0.5 --batchnorm", "freeze rank 0 in FORWARD of step 5"),
}


IN_CI = (
    "static_graph_ema_clip",
    "foreach_overflow_stateful",
    "several_sources_batchnorm_evaluate",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.all) for name in TOGETHER]
)
def test_features_together(bench: Bench, name: str) -> None:
    check_feature(bench, *TOGETHER[name])


@pytest.mark.all
@pytest.mark.parametrize("name", ALONE)
def test_feature_alone(bench: Bench, name: str) -> None:
    check_feature(bench, *ALONE[name])


def check_feature(bench: Bench, arguments: str, fault: str) -> None:
    training = Training(steps=STEPS, arguments=tuple(arguments.split()))
    reference = bench.reference(training)
    assert not reference.report.notices, reference.describe()
    outcome = bench.run(training, faults=[fault])
    check_survived(outcome, reference)
    check_faults(outcome, [fault])
    assert not outcome.report.notices, outcome.describe()


# Each survives a death on either side of the barrier, in one job of two ranks.
KILLS = ("kill rank 1 in BACKWARD of step 2", "kill rank 0 in OPTIMIZER of step 5")
OPTIONS = (
    "--optimizer rmsprop",
    "--optimizer adafactor",
    "--optimizer muon",
    "--groups",
    "--groups --optimizer sgd --scheduler one-cycle",
    "--scheduler plateau",
    "--scheduler one-cycle",
    "--scheduler sequential",
    "--local-buffers",
    "--local-buffers --batchnorm --scheduler plateau",
    "--ddp view",
    "--ddp static",
    "--ddp static-view --groups --optimizer rmsprop",
    "--optimizer muon --scheduler sequential --ddp static-view --local-buffers --batchnorm --clip",
)


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(arguments, marks=() if "muon --s" in arguments else pytest.mark.all) for arguments in OPTIONS],
)
def test_options(bench: Bench, arguments: str) -> None:
    training = Training(ranks=2, steps=STEPS, arguments=tuple(arguments.split()))
    reference = bench.reference(training)
    outcome = bench.run(training, faults=KILLS, standbys=2)
    check_survived(outcome, reference)
    check_faults(outcome, KILLS)
    assert not outcome.report.notices, outcome.describe()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), marks=pytest.mark.all),
        pytest.param(("--optimizer", "sgd"), marks=pytest.mark.all),
        pytest.param(("--optimizer", "adamw-fused"), marks=pytest.mark.all),
        pytest.param(("--batchnorm",), marks=pytest.mark.all),
    ],
    ids=" ".join,
)
def test_undisturbed_is_plain_ddp(bench: Bench, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Relight itself changes no bit: the same loop under torchrun ends with the same parameters on each rank."""
    training = Training(steps=STEPS, arguments=("--dropout", "0", "--noise", "0", *arguments))
    plain = finals_under_torchrun(tmp_path, training.ranks, "plain_ddp.py", "--steps", str(STEPS), *arguments)
    assert plain == bench.reference(training).finals
