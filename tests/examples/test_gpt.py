"""The example as a user runs it: a worker lost on the way leaves no trace in what was learned."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from relight.core.account.report import JobReport, decode_report
from relight.wire.template import SHARED_VARIABLE
from tests.survival.harness import PRELOADED, template_socket

SCRIPT = Path(__file__).parents[2] / "examples" / "gpt" / "train.py"
MODEL = "--layers 1 --width 32 --heads 2 --context 32".split()
SHORT = "--batch-size 2 --megabytes 0.2 --steps 6 --evaluate-every 3".split()
DEADLINE_SECONDS = 100.0 * float(os.environ.get("RELIGHT_TEST_PATIENCE", "1"))
END_SECONDS = 30.0


def test_a_killed_worker_changes_neither_the_state_nor_what_is_printed(tmp_path: Path) -> None:
    sentence = "kill rank 0 in BACKWARD of step 4"
    disturbed, printed = train(tmp_path / "disturbed", "--standby", "1", "--chaos", sentence)
    undisturbed, printed_in_peace = train(tmp_path / "undisturbed", *PRELOADED)  # which changes no bit

    assert [(f.kind, f.rank, f.step, f.phase) for f in disturbed.failures] == [("killed", 0, 4, "BACKWARD")]
    assert undisturbed.failures == ()
    assert disturbed.steps == undisturbed.steps == 6
    assert disturbed.final_state_digest == undisturbed.final_state_digest != ""
    assert disturbed.final_lineage == undisturbed.final_lineage != ""
    assert any("step 6: loss" in line for line in printed)
    assert printed == printed_in_peace


def train(run_dir: Path, *flags: str) -> tuple[JobReport, list[str]]:
    """Run the example with two workers to its end: the report, and the lines that rank 0 printed."""
    command = [sys.executable, "-m", "relight.cli", "run", "--nproc-per-node", "2", "--run-dir", str(run_dir), *flags]
    printed = run_until(DEADLINE_SECONDS, [*command, str(SCRIPT), *MODEL, *SHORT])
    report = decode_report((run_dir / "report.json").read_bytes())
    return report, [line for line in printed.splitlines() if line.startswith("[rank 0]")]


def run_until(seconds: float, command: Sequence[str]) -> str:
    """The standard output of a command that succeeds within so many seconds. Nothing of it outlives this call."""
    shared = {SHARED_VARIABLE: template_socket()} if "--preload" in command else {}
    process = subprocess.Popen(
        command, env={**os.environ, **shared}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate(timeout=END_SECONDS)
        pytest.fail(f"not done within {seconds:g} s:\n{output}\n{errors}")
    finally:
        process.kill()  # relight ends its own workers when it is gone
    assert process.returncode == 0, f"{output}\n{errors}"
    return output
