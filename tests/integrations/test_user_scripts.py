"""Scripts in the shapes that people publish, with frameworks: killed in several phases, and equal to themselves.

Each is run undisturbed and with kills: what each rank ends with (weights, optimizer, rates, log, the script's own
state), the files and what reporters were given must be equal; where random streams allow, also to the framework's own
run without relight. The scripts that relight cannot repeat are refused by name.

Runs where the framework is installed (`make test-integrations`).
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.survival.harness import (
    DEADLINE_SECONDS,
    OFFLINE,
    PRELOAD,
    ROOT,
    Job,
    Outcome,
    Training,
    plain_environment,
)

PROGRAMS = ROOT / "tests" / "integrations" / "user_scripts"
NEEDS = {
    **dict.fromkeys(("trainers.py", "trainer_settings.py"), "transformers"),
    **dict.fromkeys(("modules.py", "module_settings.py"), "lightning"),
    **dict.fromkeys(("accelerated.py", "accelerated_pair.py"), "accelerate"),
    "preferences.py": "trl",
}
# Most of what a Trainer imports, without `datasets`, which starts a thread: three quarters of a worker's start.
PRELOAD_TRANSFORMERS = f"{PRELOAD},accelerate,transformers.modeling_utils" if PRELOAD else ""
FAULTS = {
    "computing": ("kill rank 0 in BACKWARD of step 3", "kill rank 1 in OPTIMIZER of step 6"),
    "after": ("kill rank 1 in FORWARD of step 4", "kill rank 0 in AFTER_WRITE of step 8"),
}
WAITING = {  # manual optimization of two batches, of which the first makes no optimizer step, or one of two
    "before": ("kill rank 0 in BACKWARD of step 0", "kill rank 1 in BARRIER of step 4"),
    "between": ("kill rank 0 in BACKWARD of step 9", "kill rank 1 between steps at step 13"),
    "after": ("kill rank 1 in OPTIMIZER of step 3", "kill rank 0 in AFTER_STEP of step 14"),
}
# Scripts that draw no random numbers, or draw them as under relight.
AS_ALONE = {
    "trainers.py": (
        *(
            "adversarial",
            "averages_late",
            "clm",
            "contrastive",
            "curriculum",
            "distilled",
            "ema_object",
            "history",
            "logs_decide",
            "saves",
            "set_on_library",
            "unfreezes",
            "weighted",
        ),
    ),
    "modules.py": ("byol", "containers", "curriculum", "hooks", "validations"),
}
ALONE_DIFFERS = {
    "trainers.py": ("glue", "workers", "seq2seq", "module_state", "unnamed", "unnamed_functions"),
    "modules.py": ("teacher", "weighted", "samplers", "batch_sampler"),
    "accelerated.py": ("plain", "saves", "bf16", "accumulates"),
    "accelerated_pair.py": ("tracked", "bf16", "saves"),
    "preferences.py": ("dpo", "kto", "reward", "adalora"),
}
REFUSED = {
    ("trainers.py", "keeps_iterator"): "it reads on in an iterator that an earlier step made",
    ("trainers.py", "iterable"): "the training data is an IterableDataset",
    ("trainers.py", "ema_module"): "that a step has made, changes from step to step",
    ("trainers.py", "late_average"): "AveragedModel (trainers.py:",
    ("preferences.py", "precomputed"): "`precompute_ref_log_probs=True`",
    ("modules.py", "late_teacher"): "self.teacher (modules.py:",
    ("modules.py", "tracker"): "a step has made tracker.",
    ("trainers.py", "twice"): "a second `train()` in a process",
    ("trainers.py", "finds_batch_size"): "`auto_find_batch_size=True`",
    ("modules.py", "swa"): "use WeightAveraging",
    ("modules.py", "finetuning"): "Instead: freeze in on_train_start",
    ("modules.py", "backbone"): "Instead: freeze in on_train_start",
    ("trainers.py", "curriculum_of_workers"): "with workers of the loader: the workers have copies of it",
    ("accelerated.py", "prepared"): "accelerator.accumulate() counts micro-batches from step to step",
}
SCRIPTS = [
    (program, kind, alone)
    for alone, table in ((True, AS_ALONE), (False, ALONE_DIFFERS))
    for program, kinds in table.items()
    for kind in kinds
]


def skip_without(program: str) -> None:
    if importlib.util.find_spec(NEEDS[program]) is None:
        pytest.skip(f"{NEEDS[program]} is not installed")


def preload(program: str) -> str:
    """Return the modules that workers of a script are forked with, as with `--preload`."""
    return PRELOAD if NEEDS.get(program) == "lightning" else PRELOAD_TRANSFORMERS


def run(directory: Path, program: str, kind: str, faults: Sequence[str] = ()) -> Outcome:
    """Run a script under relight to its end."""
    arguments = (kind, "--output", str(directory / "output"))
    training = Training(ranks=2, steps=0, program=str(PROGRAMS / program), arguments=arguments)
    with Job(directory, training, faults=faults, standbys=1, environment=OFFLINE, preload=preload(program)) as job:
        return job.wait(2 * DEADLINE_SECONDS)


def survive(directory: Path, program: str, kind: str, faults: Sequence[str] = ()) -> list[str]:
    """Run a script under relight, and return the traces that it leaves."""
    outcome = run(directory, program, kind, faults)
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "yes", outcome.describe()
    assert len(outcome.report.failures) == len(faults), outcome.describe()
    return traces(outcome.stdout)


def alone(directory: Path, program: str, kind: str) -> list[str]:
    """Run a script under torchrun, where the framework trains by itself, and return the traces that it leaves."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(PROGRAMS / program), kind, "--output", str(directory / "output")),
            *(("--strategy", "ddp") if program == "modules.py" else ()),
        ],
        env={**plain_environment(), **OFFLINE},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_SECONDS,
        check=True,
    )
    return traces(done.stdout)


def traces(stdout: str) -> list[str]:
    return sorted(re.findall(r"rank \d+: \{.*\}|files: .*", stdout))


def test_accelerate_knows_a_rank_that_is_taken_after_the_last_step(tmp_path: Path) -> None:
    """The replacement is built as rank 1, and is the main process once it has taken rank 0."""
    skip_without("accelerated.py")
    whole = run(tmp_path / "whole", "accelerated.py", "plain")
    fault = f"kill rank 0 in AFTER_STEP of step {whole.report.final_version - 1}"
    assert survive(tmp_path / "struck", "accelerated.py", "plain", [fault]) == traces(whole.stdout)


@pytest.mark.parametrize(("program", "kind", "is_as_alone"), SCRIPTS, ids=[kind for _, kind, _ in SCRIPTS])
def test_a_script_ends_as_undisturbed(program: str, kind: str, is_as_alone: bool, tmp_path: Path) -> None:
    skip_without(program)
    whole = survive(tmp_path / "whole", program, kind)
    assert len(whole) >= 2  # what each rank ends with, and the files
    if is_as_alone:
        assert whole == alone(tmp_path / "alone", program, kind)
    for name, faults in FAULTS.items():
        assert survive(tmp_path / name, program, kind, faults) == whole


@pytest.mark.parametrize("program", ["trainers.py", "modules.py"])
def test_a_script_that_is_installed_ends_as_undisturbed(program: str, tmp_path: Path) -> None:
    """The package that has a Trainer train is the script: its datasets and callbacks have state."""
    skip_without(program)
    installed = str(shutil.copytree(PROGRAMS, tmp_path / "site-packages" / "acme") / program)
    whole = survive(tmp_path / "whole", installed, "curriculum")
    assert survive(tmp_path / "computing", installed, "curriculum", FAULTS["computing"]) == whole


@pytest.mark.parametrize(("program", "kind"), REFUSED)
def test_a_script_is_refused(program: str, kind: str, tmp_path: Path) -> None:
    skip_without(program)
    outcome = run(tmp_path, program, kind)
    assert outcome.status == 1, outcome.describe()
    assert REFUSED[program, kind] in outcome.stderr, outcome.describe()


@pytest.mark.parametrize("kind", ["manual", "manual_pair"])
def test_gradients_that_wait_in_manual_optimization_are_kept(kind: str, tmp_path: Path) -> None:
    skip_without("modules.py")
    whole = survive(tmp_path / "whole", "modules.py", kind)
    for name, faults in WAITING.items():
        assert survive(tmp_path / name, "modules.py", kind, faults) == whole


def test_more_gradients_than_can_be_kept_are_refused(tmp_path: Path) -> None:
    skip_without("modules.py")
    outcome = run(tmp_path, "modules.py", "manual_large")
    assert outcome.status == 1, outcome.describe()
    assert "gradients of 34 MiB wait after a training_step without an optimizer step" in outcome.stderr


def test_loops_of_a_subclass_are_told_from_methods_around_the_loop() -> None:
    skip_without("trainers.py")
    from relight.integrations.transformers.trainer import Trainer, _has_own_loop

    class Around(Trainer):
        def _inner_training_loop(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return super()._inner_training_loop(*args, **kwargs)

    class Instead(Trainer):
        def _inner_training_loop(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return None

    class Epoch(Around):
        def _run_epoch(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            return None

    assert [_has_own_loop(kind) for kind in (Trainer, Around, Instead, Epoch)] == [False, False, True, True]
