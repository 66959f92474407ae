"""The example with divided state as a user runs it: a worker lost on the way leaves no trace in what was learned."""

import sys
from pathlib import Path

from relight.core.account.report import JobReport, decode_report
from tests.examples.test_gpt import DEADLINE_SECONDS, run_until
from tests.survival.harness import PRELOADED

SCRIPT = Path(__file__).parents[2] / "examples" / "hsdp" / "train.py"
SHORT = "--steps 4 --tell-every 2 --width 10 --layers 1 --batch-size 4".split()
# The standby was built as rank 3: it must get into other groups, and hold another part, of another size.
FAULT = "kill rank 0 in BACKWARD of step 2"


def test_a_killed_worker_changes_neither_the_state_nor_what_is_printed(tmp_path: Path) -> None:
    disturbed, printed = train(tmp_path / "disturbed", "--standby", "1", "--chaos", FAULT)
    undisturbed, printed_in_peace = train(tmp_path / "undisturbed")

    assert [(f.kind, f.rank, f.step, f.phase) for f in disturbed.failures] == [("killed", 0, 2, "BACKWARD")]
    assert [recovery.sources for recovery in disturbed.recoveries] == [(2,)]
    assert undisturbed.failures == ()
    assert disturbed.steps == undisturbed.steps == 4
    assert disturbed.final_state_digest == undisturbed.final_state_digest != ""
    assert disturbed.final_lineage == undisturbed.final_lineage != ""
    assert any("step 4: loss" in line for line in printed)
    assert printed == printed_in_peace


def train(run_dir: Path, *flags: str) -> tuple[JobReport, list[str]]:
    """Run the example on a mesh of 2 x 2 to its end: the report, and the lines that rank 0 printed."""
    command = [sys.executable, "-m", "relight.cli", "run", "--nproc-per-node", "4", "--run-dir", str(run_dir), *flags]
    printed = run_until(DEADLINE_SECONDS, [*command, *PRELOADED, str(SCRIPT), *SHORT])
    report = decode_report((run_dir / "report.json").read_bytes())
    return report, [line for line in printed.splitlines() if line.startswith("[rank 0]")]
