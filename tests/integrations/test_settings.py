"""Scripts composed of settings, with Hugging Face's and Lightning's Trainer: killed, and equal to themselves.

Each script has one setting of each group of its table (`user_scripts/*_settings.py`), so that each setting is in a
script, beside others. What a script ends with (weights, optimizer, log, state of its own, files) must be that of the
script undisturbed: with kills in phases of steps, and with a rank that kills itself in a hook, while the job
evaluates, saves or logs. A job that ends well with other bits is the worst result of all.

Runs where the framework is installed (`make test-integrations`).
"""

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integrations.test_user_scripts import PROGRAMS, preload, skip_without, traces
from tests.survival.harness import DEADLINE_SECONDS, OFFLINE, Job, Outcome, Training

PHASES = {
    "early": (
        "kill rank 0 in BACKWARD of step 0",
        "kill rank 1 in OPTIMIZER of step 4",
        "kill rank 0 in BARRIER of step 7",
    ),
    "late": ("kill rank 1 in FORWARD of step 5", "kill rank 0 in AFTER_WRITE of step 7"),
}
# A rank that kills itself: the hook, the rank, and the optimizer steps that are done.
HOOKS = {
    "trainer_settings.py": (
        *("on_evaluate:0:3", "on_save:0:2", "on_log:0:4", "on_prediction_step:1:3", "on_epoch_end:0:1"),
    ),
    "module_settings.py": (
        *("on_validation_batch_end:0:2", "on_save_checkpoint:0:3", "on_train_epoch_end:1:1", "on_validation_end:1:3"),
    ),
}  # fmt: skip


def groups_of(program: str) -> dict[str, list[str | None]]:
    """Read the table of a script, without the framework."""
    for node in ast.parse((PROGRAMS / program).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "GROUPS":
            table = ast.literal_eval(ast.unparse(_Named().visit(node.value)))
            return {group: list(settings) for group, settings in table.items()}
    raise AssertionError(f"{program} has no GROUPS")


class _Named(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(node.id)


def composed(program: str) -> list[str]:
    """Return the scripts: the n-th setting of each group together."""
    columns = zip(*groups_of(program).values(), strict=True)
    return ["+".join(filter(None, column)) for column in columns]


CASES = [(program, settings, number) for program in HOOKS for number, settings in enumerate(composed(program))]


def run(directory: Path, program: str, settings: str, faults: Sequence[str] = (), dies: str = "") -> Outcome:
    """Run a script to its end."""
    arguments = (settings, "--output", str(directory / "output"), *(("--dies", dies) if dies else ()))
    training = Training(ranks=2, steps=0, program=str(PROGRAMS / program), arguments=arguments)
    with Job(directory, training, faults=faults, standbys=1, environment=OFFLINE, preload=preload(program)) as job:
        return job.wait(3 * DEADLINE_SECONDS)


def survive(directory: Path, program: str, settings: str, faults: Sequence[str] = (), dies: str = "") -> list[str]:
    """Run a script, and return the traces that it leaves."""
    outcome = run(directory, program, settings, faults, dies)
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "yes", outcome.describe()
    died = (directory / "output.died").exists()
    missed = [each for each in outcome.report.notices if each.startswith("planned fault did not occur")]
    assert len(missed) <= died, outcome.describe()  # the rank's own death came first in that step
    assert len(outcome.report.failures) == len(faults) + died - len(missed), outcome.describe()
    return traces(outcome.stdout)


@pytest.mark.parametrize(("program", "settings", "number"), CASES, ids=[settings for _, settings, _ in CASES])
def test_a_script_of_settings_ends_as_undisturbed(program: str, settings: str, number: int, tmp_path: Path) -> None:
    skip_without(program)
    if "peft" in settings and importlib.util.find_spec("peft") is None:
        settings = settings.replace("peft+", "").replace("+peft", "")
    whole = survive(tmp_path / "whole", program, settings)
    assert len(whole) == 3
    hooks = HOOKS[program]
    for turn, (name, faults) in enumerate(PHASES.items()):
        dies = hooks[(2 * number + turn) % len(hooks)]
        assert survive(tmp_path / name, program, settings, faults, dies) == whole, (name, dies)


_LATE = "a step has made the module of callback lazy_copy.<locals>.Callback.ema"
REFUSED = {
    ("trainer_settings.py", "lazy_copy"): "that a step has made, changes from step to step",
    ("module_settings.py", "lazy_copy"): _LATE,
    ("module_settings.py", "counted_copy"): _LATE,
}


@pytest.mark.parametrize(("program", "settings"), REFUSED)
def test_a_script_ends_by_name_in_its_first_steps(program: str, settings: str, tmp_path: Path) -> None:
    skip_without(program)
    outcome = run(tmp_path, program, settings)
    assert outcome.status == 1, outcome.describe()
    assert REFUSED[program, settings] in outcome.stderr, outcome.describe()
    assert outcome.report.final_version < 4, outcome.describe()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_callback_that_makes_a_module_later_is_told_and_its_bits_are_doubted(rank: int, tmp_path: Path) -> None:
    program = "module_settings.py"
    skip_without(program)
    assert len(survive(tmp_path / "whole", program, "best_copy")) == 3
    outcome = run(tmp_path / "killed", program, "best_copy", [f"kill rank {rank} in BACKWARD of step 12"])
    assert outcome.status == 0, outcome.describe()
    assert outcome.report.bits_as_undisturbed == "not known", outcome.describe()
    assert any("a step has made the module of callback" in doubt.reason for doubt in outcome.report.doubts)
    assert "Callback.best" in outcome.stdout  # that was said


def test_each_setting_is_in_a_script() -> None:
    for program in HOOKS:
        settings = {each for group in groups_of(program).values() for each in group if each}
        assert settings == {each for script in composed(program) for each in script.split("+")}
