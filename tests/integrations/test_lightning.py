"""The Lightning example: killed in its phases, while it validates, saves and logs, and equal to itself undisturbed.

Runs where lightning is installed (`make test-integrations`).
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.survival.harness import DEADLINE_SECONDS, ROOT, Job, Training, plain_environment

pytest.importorskip("lightning", exc_type=ImportError)

EXAMPLE = ROOT / "examples" / "lightning" / "train.py"
STEPS = 12  # of the optimizer, six an epoch
# A validation and a checkpoint follow optimizer steps 2, 5, 8 and 11, at the head of the steps after them. Each step
# logs at its head what the one before has computed.
DISTURBANCES = {
    "forward and backward": ("kill rank 0 in FORWARD of step 2", "kill rank 1 in BACKWARD of step 7"),
    "barrier": ("kill rank 0 in BARRIER of step 4", "kill rank 1 in BARRIER of step 8"),
    "write": ("kill rank 0 in OPTIMIZER of step 3", "kill rank 1 in AFTER_WRITE of step 9"),
    "validation, saving and logging": ("kill rank 0 in FORWARD of step 6", "kill rank 1 in FORWARD of step 9"),
    "write after a validation": ("kill rank 0 in AFTER_WRITE of step 6",),
    "last validation": ("kill rank 0 in BARRIER of step 12",),
}


class Ended(NamedTuple):
    """Traces of a run: digests, logs, files."""

    digests: dict[str, str]  # what each rank printed
    logged: str
    files: list[str]


def train(directory: Path, faults: Sequence[str] = (), arguments: Sequence[str] = ()) -> Ended:
    """Run the example under relight."""
    output = directory / "output"
    training = Training(ranks=2, steps=0, program=str(EXAMPLE), arguments=("--output", str(output), *arguments))
    with Job(directory, training, faults=faults, standbys=1) as job:
        outcome = job.wait(DEADLINE_SECONDS)
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "yes", outcome.describe()
    assert len(outcome.report.failures) == len(faults), outcome.describe()
    return ended(outcome.stdout, output)


def train_without(directory: Path) -> Ended:
    """Run the example under torchrun, with Lightning's own strategy."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(EXAMPLE), "--strategy", "ddp", "--output", str(directory / "output")),
        ],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    return ended(done.stdout, directory / "output")


def ended(stdout: str, output: Path) -> Ended:
    """Collect digests, logged metrics and names of files."""
    return Ended(
        dict(re.findall(r"rank (\d+): (\d+ steps, digest \w+)", stdout)),
        (output / "log" / "version_0" / "metrics.csv").read_text(),
        sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Run it without a failure."""
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("name", DISTURBANCES)
def test_ends_with_the_bits_logs_and_files_of_an_undisturbed_run(name: str, tmp_path: Path, undisturbed: Ended) -> None:
    assert undisturbed.digests["0"].startswith(f"{STEPS} steps")
    assert train(tmp_path, DISTURBANCES[name]) == undisturbed


def test_has_the_bits_and_logs_of_lightnings_own_strategy(tmp_path: Path, undisturbed: Ended) -> None:
    assert train_without(tmp_path) == undisturbed
