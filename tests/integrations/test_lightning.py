"""The Lightning example, and scripts as people write them, killed in their phases, while they validate, save and log.

They end with the bits, the logs and the files of a run without failures, and of Lightning's own `strategy="ddp"`.

Runs where lightning is installed (`make test-integrations`).
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.survival.harness import DEADLINE_SECONDS, ROOT, Job, Training, plain_environment

pytest.importorskip("lightning", exc_type=ImportError)

EXAMPLE = ROOT / "examples" / "lightning" / "train.py"
PROGRAMS = ROOT / "tests" / "integrations" / "lightning_scripts"
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


# Hooks in which rank 0 ends itself, on which call: in the validation and at the epoch's end after optimizer step 5,
# while the checkpoint of that step is written, and as the run ends.
PLACES = {
    "validation": ("on_validation_batch_end", "3"),
    "end of an epoch": ("on_train_epoch_end", "1"),
    "start of an epoch": ("on_train_epoch_start", "2"),
    "before a checkpoint is written": ("on_save_checkpoint", "3"),
    "after a checkpoint was written": ("saved", "0"),
    "end of training": ("on_train_end", "1"),
}
# Scripts with their arguments. The GAN validates after each fourth batch; the others have eight batches an epoch.
SCRIPTS = {
    "gan": ("gan.py", (), ("kill rank 0 in FORWARD of step 4", "kill rank 1 in OPTIMIZER of step 14")),
    "gan that logs last": ("gan.py", ("--log-last",), ("kill rank 0 in BACKWARD of step 5",)),
    "outputs and batches": ("shapes.py", ("plain",), ("kill rank 1 in FORWARD of step 8",)),
    "objects appended": (
        *("shapes.py", ("appends",)),
        (
            "kill rank 0 in FORWARD of step 2",
            "kill rank 1 in BARRIER of step 9",
            "kill rank 0 in AFTER_WRITE of step 14",
        ),
    ),
    "weight averaging": ("shapes.py", ("average",), ("kill rank 0 in FORWARD of step 8",)),
    "plateau": ("shapes.py", ("plateau",), ("kill rank 0 in OPTIMIZER of step 16",)),
    "bf16 and clipping": ("shapes.py", ("bf16",), ("kill rank 0 in BACKWARD of step 3",)),
    "limits": ("shapes.py", ("limits",), ("kill rank 1 in FORWARD of step 3",)),
    "max_steps": ("shapes.py", ("steps",), ("kill rank 0 in FORWARD of step 5",)),
    "two checkpoint callbacks": ("shapes.py", ("two",), ("kill rank 0 in FORWARD of step 16",)),
    "workers of the loader": ("shapes.py", ("workers",), ("kill rank 0 in FORWARD of step 8",)),
    "LBFGS": ("shapes.py", ("lbfgs",), ("kill rank 1 in OPTIMIZER of step 9",)),
}
REFUSED = {
    "devices": ("--devices", "4", "make `relight run --nproc-per-node` and devices equal"),
    "fit twice": ("--fits", "2", "a second time"),
    "relight.init": ("--init", "1", "leave out relight.init"),
    "iterable data": ("--data", "iterable", "has no length"),
}


class Ended(NamedTuple):
    """Traces of a run: digests, logs, files."""

    digests: dict[str, str]  # what each rank printed
    logged: str
    files: list[str]


def train(
    directory: Path,
    faults: Sequence[str] = (),
    arguments: Sequence[str] = (),
    program: Path = EXAMPLE,
    failures: int | None = None,
) -> Ended:
    """Run a script under relight, with as many failures as faults unless `failures` says another number."""
    output = directory / "output"
    training = Training(ranks=2, steps=0, program=str(program), arguments=(*arguments, "--output", str(output)))
    with Job(directory, training, faults=faults, standbys=1) as job:
        outcome = job.wait(DEADLINE_SECONDS)
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "yes", outcome.describe()
    assert len(outcome.report.failures) == (len(faults) if failures is None else failures), outcome.describe()
    return ended(outcome.stdout, output)


def train_without(directory: Path, arguments: Sequence[str] = (), program: Path = EXAMPLE) -> Ended:
    """Run a script under torchrun, with Lightning's own strategy."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)),
            *("--strategy", "ddp", "--output", str(directory / "output"), *arguments),
        ],
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    return ended(done.stdout, directory / "output")


def ended(stdout: str, output: Path) -> Ended:
    """Collect digests, logged metrics and names of files; TensorBoard's have a number of the process's own."""
    files = {str(path.relative_to(output)) for path in output.rglob("*") if path.is_file()}
    log = output / "log" / "version_0" / "metrics.csv"
    return Ended(
        # torchrun's ranks write their lines and the ends of these one by one, so that two may share one.
        dict(re.findall(r"rank (\d+): (\d+ steps, digest .*?)(?=rank \d|$)", stdout, re.MULTILINE)),
        log.read_text() if log.exists() else "",
        sorted({re.sub(r"tfevents\..*", "tfevents", name) for name in files}),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Run it without a failure."""
    return train(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("name", DISTURBANCES)
def test_ends_with_the_bits_logs_and_files_of_an_undisturbed_run(name: str, tmp_path: Path, undisturbed: Ended) -> None:
    assert undisturbed.digests["0"].startswith(f"{STEPS} steps")
    assert train(tmp_path, DISTURBANCES[name]) == undisturbed


@pytest.mark.parametrize("place", PLACES)
def test_a_death_in_a_hook_leaves_the_same(place: str, tmp_path: Path, undisturbed: Ended) -> None:
    arguments = (*PLACES[place], str(tmp_path / "mark"))
    assert train(tmp_path, (), arguments, PROGRAMS / "dies.py", failures=1) == undisturbed


@pytest.mark.parametrize("place", ["BARRIER", "AFTER_WRITE", "AFTER_STEP"])
def test_a_rank_is_lost_while_the_others_stop_early(place: str, tmp_path: Path) -> None:
    """A callback stops after eight steps: the head of step 8, by number, hears of it, and the loop is left."""
    whole = train(tmp_path / "whole", program=PROGRAMS / "stops.py")
    assert whole.digests["0"].startswith("8 steps")
    faults = (f"kill rank 0 in {place} of step 8",)
    assert train(tmp_path / "killed", faults, program=PROGRAMS / "stops.py") == whole


def test_has_the_bits_and_logs_of_lightnings_own_strategy(tmp_path: Path, undisturbed: Ended) -> None:
    assert train_without(tmp_path) == undisturbed


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_under_lightnings_own_strategy(name: str, tmp_path: Path) -> None:
    program, arguments, faults = SCRIPTS[name]
    plain = train_without(tmp_path / "plain", arguments, PROGRAMS / program)
    assert set(plain.digests) == {"0", "1"}
    assert train(tmp_path / "relight", faults, arguments, PROGRAMS / program) == plain


def test_a_loop_with_fabric_ends_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", (), (), PROGRAMS / "fabric.py")
    faults = ("kill rank 0 in BACKWARD of step 4", "kill rank 1 in OPTIMIZER of step 7")
    assert whole.digests["0"].endswith("zero True")
    assert train(tmp_path / "killed", faults, (), PROGRAMS / "fabric.py") == whole


@pytest.mark.parametrize("checkpoint", ["last.ckpt", "epoch=0-step=3.ckpt"], ids=["epoch's end", "middle of an epoch"])
def test_goes_on_from_a_checkpoint_of_lightnings(checkpoint: str, tmp_path: Path) -> None:
    without_draws = ("--dropout", "0")
    whole = train(tmp_path / "whole", (), without_draws)
    train(tmp_path / "first", (), ("--epochs", "1", *without_draws))
    resume = ("--resume", str(tmp_path / "first" / "output" / checkpoint), *without_draws)
    faults = ("kill rank 0 in FORWARD of step 1", "kill rank 1 in OPTIMIZER of step 3")
    assert train(tmp_path / "second", faults, resume).digests == whole.digests


def test_a_standby_that_starts_when_there_is_a_newer_checkpoint_does_not_read_it(tmp_path: Path) -> None:
    """The first failure has a standby started while the job writes checkpoints into the directory it resumed from."""
    without_draws = ("--dropout", "0")
    whole = train(tmp_path / "whole", (), without_draws)
    train(tmp_path / "first", (), ("--epochs", "1", *without_draws))
    shutil.copytree(tmp_path / "first" / "output", tmp_path / "second" / "output")
    faults = ("kill rank 0 in FORWARD of step 1", "kill rank 1 in OPTIMIZER of step 5")
    assert train(tmp_path / "second", faults, ("--resume", "last", *without_draws)).digests == whole.digests


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str, tmp_path: Path) -> None:
    option, value, words = REFUSED[name]
    arguments = ("--output", str(tmp_path / "output"), option, value)
    training = Training(ranks=2, steps=0, program=str(PROGRAMS / "refused.py"), arguments=arguments)
    with Job(tmp_path, training, standbys=0) as job:
        outcome = job.wait(DEADLINE_SECONDS)
    assert outcome.status == 1, outcome.describe()
    assert words in outcome.stderr, outcome.describe()
