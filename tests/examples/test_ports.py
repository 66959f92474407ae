"""The ports of public training scripts: as many lines as is said, and a lost worker changes nothing."""

import difflib
import re
import sys
from pathlib import Path

import pytest

from relight.core.account.report import JobReport, decode_report
from tests.examples.test_gpt import DEADLINE_SECONDS, run_until
from tests.survival.harness import PRELOADED

PORTS = Path(__file__).parents[2] / "examples" / "ports"
SHORT = {
    "nanogpt": "--max_iters 8 --eval_interval 4 --block_size 16 --n_embd 16".split(),
    "imagenet": "--epochs 2 --images 64 --batch-size 8 --width 4".split(),
}
# nanoGPT's scaler is there, and not in use; the other's kill strikes in the second epoch.
FAULTS = {"nanogpt": "kill rank 0 in BACKWARD of step 5", "imagenet": "kill rank 1 in OPTIMIZER of step 6"}


@pytest.mark.parametrize("name", ["nanogpt", pytest.param("imagenet", marks=pytest.mark.all)])
def test_a_killed_worker_changes_neither_the_state_nor_what_is_printed(tmp_path: Path, name: str) -> None:
    disturbed, printed = train(name, tmp_path / "disturbed", "--standby", "1", "--chaos", FAULTS[name])
    undisturbed, printed_in_peace = train(name, tmp_path / "undisturbed")
    assert [failure.kind for failure in disturbed.failures] == ["killed"]
    assert undisturbed.failures == ()
    assert disturbed.steps == undisturbed.steps == 8
    assert disturbed.final_state_digest == undisturbed.final_state_digest != ""
    assert printed == printed_in_peace
    assert len(printed) == 2


def train(name: str, run_dir: Path, *flags: str) -> tuple[JobReport, list[str]]:
    """Run a port to its end: the report, and the lines that rank 0 printed."""
    command = [sys.executable, "-m", "relight.cli", "run", "--nproc-per-node", "2", "--run-dir", str(run_dir), *flags]
    printed = run_until(DEADLINE_SECONDS, [*command, *PRELOADED, str(PORTS / f"{name}_relight.py"), *SHORT[name]])
    report = decode_report((run_dir / "report.json").read_bytes())
    return report, [line for line in printed.splitlines() if line.startswith("[rank 0]")]


@pytest.mark.all
@pytest.mark.parametrize("name", ["nanogpt", "imagenet"])
def test_the_original_runs_under_torchrun(name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run_until(DEADLINE_SECONDS, [*command, str(PORTS / f"{name}_torchrun.py"), *SHORT[name]])
    assert len(re.findall("^(?:step|epoch) ", printed, re.MULTILINE)) == 2


@pytest.mark.parametrize("column", [1, 2])
def test_a_port_takes_as_many_lines_as_is_said(column: int) -> None:
    rows = [line.split("|")[1:-1] for line in (PORTS / "README.md").read_text().splitlines() if line.startswith("|")]
    name = next(cells[column].strip().lower() for cells in rows if len(cells) == 3 and not cells[0].strip())
    said = {cells[0].strip(): cells[column].strip() for cells in rows}
    before, after = (
        [line.strip() for line in (PORTS / f"{name}_{kind}.py").read_text().partition('"""\n\n')[2].splitlines()]
        for kind in ("torchrun", "relight")
    )
    marks = [line[0] for line in difflib.ndiff(before, after) if line[0] in "+-" and line[1:].strip()]
    assert (said["lines removed"], said["lines added"]) == (str(marks.count("-")), str(marks.count("+")))
