"""torchtitan's trainer: killed in its phases, while it saves, validates and logs, and equal to itself undisturbed.

Runs where torchtitan is installed (`make test-torchtitan`).
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from relight.errors import UsageError
from tests.survival.harness import DEADLINE_SECONDS, ROOT, Job, Training, plain_environment

pytest.importorskip("torchtitan", exc_type=ImportError)

EXAMPLE = ROOT / "examples" / "torchtitan" / "train.py"
STEPS = 12
SMALL = ("--tokens", "32", "--layers", "1", "--validate")
PATIENCE_SECONDS = 3 * DEADLINE_SECONDS  # each of five processes imports torchtitan
# Optimizer steps 4, 8 and 12 are followed by a checkpoint and a validation, at the head of steps 4, 8 and 12. Steps 1,
# 3, 5 and so on log.
DISTURBANCES = {
    "forward and backward": ("kill rank 0 in FORWARD of step 2", "kill rank 3 in BACKWARD of step 7"),
    "barrier and write": ("kill rank 1 in BARRIER of step 3", "kill rank 2 in OPTIMIZER of step 6"),
    "after the write, and logging": ("kill rank 0 in AFTER_WRITE of step 5", "kill rank 0 in AFTER_STEP of step 7"),
    "saving and validation": ("kill rank 0 in FORWARD of step 4", "kill rank 2 in FORWARD of step 8"),
    "last checkpoint": ("kill rank 1 in BARRIER of step 12",),
}
LAYOUTS = {
    "DDP": ("--replicas", "2", "--shards", "1", "--accumulate", "2"),
    "partial DTensors": ("--backend", "partial_dtensor"),
    "tensor parallelism": ("--replicas", "2", "--shards", "1", "--tensor", "2"),
}


class Ended(NamedTuple):
    """Traces of a run."""

    digests: dict[str, str]  # what each rank printed
    logged: list[str]  # step, loss and norm of the gradient, by rank 0
    saved: list[str]  # files of checkpoints


def train(
    directory: Path, faults: Sequence[str] = (), arguments: Sequence[str] = (), ranks: int = 4, standbys: int = 1
) -> Ended:
    output = directory / "output"
    training = Training(
        ranks=ranks, steps=0, program=str(EXAMPLE), arguments=("--output", str(output), *SMALL, *arguments)
    )
    with Job(directory, training, faults=faults, standbys=standbys) as job:
        outcome = job.wait(PATIENCE_SECONDS)
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "yes", outcome.describe()
    assert len(outcome.report.failures) == len(faults), outcome.describe()
    return ended(outcome.stdout + outcome.stderr, output)


def train_without(directory: Path, arguments: Sequence[str] = (), ranks: int = 4) -> Ended:
    output = directory / "output"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("--local-ranks-filter", "0", str(EXAMPLE), "--output", str(output), *SMALL, *arguments),
        ],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    return ended(done.stdout + done.stderr, output)


def ended(printed: str, output: Path) -> Ended:
    return Ended(
        dict(re.findall(r"rank (\d+): (\d+ steps, digest [0-9a-f]{16})", printed)),
        sorted(set(re.findall(r"step: +\d+ +loss: +\S+(?: +grad_norm: +\S+)?", printed))),
        sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("name", DISTURBANCES)
def test_ends_with_the_bits_logs_and_checkpoints_of_an_undisturbed_run(
    name: str, tmp_path: Path, undisturbed: Ended
) -> None:
    assert undisturbed.digests["0"].startswith(f"{STEPS} steps")
    assert train(tmp_path, DISTURBANCES[name]) == undisturbed


def test_has_the_bits_and_logs_of_torchtitan_alone(tmp_path: Path, undisturbed: Ended) -> None:
    plain = train_without(tmp_path)
    assert plain.digests == {"0": undisturbed.digests["0"]}
    assert (plain.logged, plain.saved) == (undisturbed.logged, undisturbed.saved)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts(layout: str, tmp_path: Path) -> None:
    ranks = 2 if layout == "DDP" else 4
    plain = train_without(tmp_path / "plain", LAYOUTS[layout], ranks)
    faults = ("kill rank 0 in BACKWARD of step 3", "kill rank 1 in OPTIMIZER of step 6")
    found = train(tmp_path / "relight", faults, LAYOUTS[layout], ranks)
    assert found.digests["0"] == plain.digests["0"]
    assert found.logged == plain.logged


def test_goes_on_from_a_checkpoint_as_torchtitan_alone_does(tmp_path: Path) -> None:
    """The standby of the second job has loaded nothing."""
    train(tmp_path / "relight", (), ("--steps", "8"))
    shutil.copytree(tmp_path / "relight" / "output", tmp_path / "plain" / "output")
    plain = train_without(tmp_path / "plain")
    found = train(tmp_path / "relight", ("kill rank 3 in FORWARD of step 2",))
    assert found.digests["0"] == plain.digests["0"]
    assert (found.logged, found.saved) == (plain.logged, plain.saved)


# --- what is refused ------------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"parallelism.pipeline_parallel_degree": 2}, "pipeline_parallel_degree"),
    "context": ({"parallelism.context_parallel_degree": 2}, "context_parallel_degree"),
    "experts": ({"parallelism.expert_parallel_degree": 2}, "expert_parallel_degree"),
    "symmetric memory": ({"parallelism.enable_fsdp_symm_mem": True}, "enable_fsdp_symm_mem"),
    "CUDA graphs": ({"training.disable_cuda_graphs": False}, "disable_cuda_graphs"),
    "another backend": ({"comm.mode": "fake_backend"}, "comm.mode"),
    "asynchronous checkpoints": ({"checkpoint.enable": True, "checkpoint.async_mode": "async"}, "async_mode"),
    "seed checkpoint": ({"checkpoint.create_seed_checkpoint": True}, "create_seed_checkpoint"),
    "loggers everywhere": (
        {"metrics.save_for_all_ranks": True, "metrics.enable_tensorboard": True},
        "save_for_all_ranks",
    ),
}


def supported() -> Any:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import CommConfig

    return SimpleNamespace(
        parallelism=ParallelismConfig(),
        training=TrainingConfig(disable_cuda_graphs=True),
        checkpoint=CheckpointManager.Config(),
        comm=CommConfig(),
        metrics=MetricsProcessor.Config(),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name: str) -> None:
    from relight.integrations.torchtitan.refusals import refuse_unsupported

    config = supported()
    refuse_unsupported(config)
    changes, words = REFUSED[name]
    for path, value in changes.items():
        part, field = path.split(".")
        setattr(getattr(config, part), field, value)
    with pytest.raises(UsageError, match=re.escape(words)):
        refuse_unsupported(config)
