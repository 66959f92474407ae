"""TRL's SFTTrainer: killed in its phases, and equal to itself undisturbed, with all that it logged.

Runs where trl is installed (`make test-integrations`).
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relight.errors import UsageError
from tests.integrations.test_user_scripts import PRELOAD_TRANSFORMERS
from tests.survival.harness import DEADLINE_SECONDS, OFFLINE, ROOT, Job, Training, plain_environment

pytest.importorskip("trl", exc_type=ImportError)

EXAMPLE = ROOT / "examples" / "trl" / "train.py"
# Optimizer steps 4 and 8 are followed by an evaluation and a checkpoint, at the head of steps 4 and 8.
DISTURBANCES = {
    "computing": ("kill rank 0 in FORWARD of step 3", "kill rank 1 in BACKWARD of step 7"),
    "writing, evaluating, saving": ("kill rank 1 in OPTIMIZER of step 5", "kill rank 0 in FORWARD of step 8"),
    "last evaluation": ("kill rank 0 in BARRIER of step 12",),
}
Printed = tuple[dict[str, str], str]  # what each rank said, and what rank 0 logged


def train(directory: Path, faults: Sequence[str] = (), arguments: Sequence[str] = ()) -> Printed:
    training = Training(
        ranks=2, steps=0, program=str(EXAMPLE), arguments=("--output", str(directory / "output"), *arguments)
    )
    with Job(directory, training, faults=faults, standbys=1, environment=OFFLINE, preload=PRELOAD_TRANSFORMERS) as job:
        outcome = job.wait(2 * DEADLINE_SECONDS)  # each process imports most of trl
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "yes", outcome.describe()
    assert len(outcome.report.failures) == len(faults), outcome.describe()
    return printed(outcome.stdout)


def printed(output: str) -> Printed:
    (logged,) = re.findall(r"logged: (.*)", output)
    return dict(re.findall(r"rank (\d+): (\d+ steps, digest [0-9a-f]{16})", output)), logged


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("name", DISTURBANCES)
def test_ends_with_the_bits_and_logs_of_an_undisturbed_run(name: str, tmp_path: Path, undisturbed: Printed) -> None:
    assert undisturbed[0]["0"].startswith("12 steps")
    assert train(tmp_path, DISTURBANCES[name]) == undisturbed


def test_has_the_bits_and_logs_of_torchrun_without_random_draws(tmp_path: Path) -> None:
    arguments = ("--dropout", "0")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(EXAMPLE), "--output", str(tmp_path / "plain"), *arguments),
        ],
        env={**plain_environment(), **OFFLINE},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    assert train(tmp_path / "relight", ("kill rank 0 in BACKWARD of step 5",), arguments)[0] == printed(done.stdout)[0]


def load_example() -> Any:
    """The example as a module: its model and data."""
    spec = importlib.util.spec_from_file_location("trl_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_model(example: Any) -> Any:
    size = len(example.make_tokenizer())
    return example.GPT2LMHeadModel(example.GPT2Config(vocab_size=size, n_positions=32, n_embd=8, n_layer=1, n_head=1))


def test_trainers_that_generate_their_data_are_refused_by_name(tmp_path: Path) -> None:
    import trl

    from relight.integrations.transformers.trainer import refuse_unsupported

    example = load_example()
    args = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    trainer = trl.GRPOTrainer(
        make_model(example),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=example.Dataset.from_list([{"prompt": "1 2 3"}] * 16),
        processing_class=example.make_tokenizer(),
    )
    with pytest.raises(UsageError, match=r"GRPOTrainer of TRL is not supported.* examples/grpo\.py"):
        refuse_unsupported(trainer, None)
