"""The Hugging Face example: killed in its phases, while it evaluates and saves, and equal to itself undisturbed.

Runs where transformers and accelerate are installed (`make test-integrations`).
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integrations.test_user_scripts import PRELOAD_TRANSFORMERS
from tests.survival.harness import DEADLINE_SECONDS, ROOT, Job, Training, plain_environment

pytest.importorskip("accelerate", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)

EXAMPLE = ROOT / "examples" / "huggingface" / "train.py"
STOPS = ROOT / "tests" / "integrations" / "transformers_scripts" / "stops.py"
STEPS = 12
# Optimizer steps 4 and 8 are followed by an evaluation and a checkpoint, at the head of steps 4 and 8.
DISTURBANCES = {
    "forward and backward": ("kill rank 0 in FORWARD of step 3", "kill rank 1 in BACKWARD of step 7"),
    "write": ("kill rank 1 in OPTIMIZER of step 5", "kill rank 0 in AFTER_WRITE of step 9"),
    "evaluation and saving": ("kill rank 0 in FORWARD of step 4", "kill rank 1 in FORWARD of step 8"),
    "last evaluation": ("kill rank 0 in BARRIER of step 12",),
}


def train(
    directory: Path, faults: Sequence[str] = (), arguments: Sequence[str] = (), program: Path = EXAMPLE
) -> dict[str, str]:
    """Run the example under relight. Return what each rank printed, by rank."""
    training = Training(
        ranks=2, steps=0, program=str(program), arguments=("--output", str(directory / "output"), *arguments)
    )
    with Job(directory, training, faults=faults, standbys=1, preload=PRELOAD_TRANSFORMERS) as job:
        outcome = job.wait(DEADLINE_SECONDS)
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "yes", outcome.describe()
    assert len(outcome.report.failures) == len(faults), outcome.describe()
    return digests(outcome.stdout)


def digests(output: str) -> dict[str, str]:
    """Collect `rank R: N steps, digest D`. Two ranks may write on one line."""
    return dict(re.findall(r"rank (\d+): (\d+ steps, digest [0-9a-f]{16})", output))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Output of the ranks if nothing fails."""
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("name", DISTURBANCES)
def test_ends_with_the_bits_and_losses_of_an_undisturbed_run(
    name: str, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    assert undisturbed["0"].startswith(f"{STEPS} steps")
    assert train(tmp_path, DISTURBANCES[name]) == undisturbed


@pytest.mark.parametrize("place", ["BARRIER", "AFTER_WRITE", "AFTER_STEP"])
def test_a_rank_is_lost_while_the_others_stop_early(place: str, tmp_path: Path) -> None:
    """A callback stops after six steps: the head of step 6, by number, hears of it, and the loop is left."""
    whole = train(tmp_path / "whole", program=STOPS)
    assert whole["0"].startswith("6 steps")
    assert train(tmp_path / "killed", (f"kill rank 0 in {place} of step 6",), program=STOPS) == whole


def test_has_the_bits_of_torchrun_without_random_draws(tmp_path: Path) -> None:
    arguments = ("--dropout", "0")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(EXAMPLE), "--output", str(tmp_path / "plain"), *arguments),
        ],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    assert train(tmp_path / "relight", ("kill rank 0 in BACKWARD of step 5",), arguments) == digests(done.stdout)


def test_goes_on_from_a_checkpoint_of_the_trainer(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    train(tmp_path / "first", (), ("--epochs", "1"))
    output = ("--output", str(tmp_path / "first" / "output"), "--resume", "--epochs", "2")
    found = train(tmp_path / "second", ("kill rank 0 in FORWARD of step 3",), output)
    assert set(found) == set(undisturbed)
    assert all(words.startswith(f"{STEPS} steps") for words in found.values())
