"""The examples of layouts as a user runs them: a worker lost on the way leaves no trace in what was learned."""

import sys
from pathlib import Path

import pytest

from relight.core.account.report import JobReport, decode_report
from tests.examples.test_gpt import DEADLINE_SECONDS, run_until

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = "--steps 4 --tell-every 2 --batch-size 8".split()


# Which rank is killed where, and from which it is then restored; and which rank tells the loss. The standby was built
# as rank 3, or builds late: it must get into other groups, and hold another part.
@pytest.mark.parametrize(
    ("layout", "arguments", "fault", "source", "teller"),
    [
        pytest.param("pipeline", "--width 10", "kill rank 0 in BACKWARD of step 2", 1, 3, marks=pytest.mark.all),
        pytest.param("zero", "--width 10", "kill rank 0 in OPTIMIZER of step 2", 2, 0, marks=pytest.mark.all),
        pytest.param("moe", "--width 10", "kill rank 0 in BACKWARD of step 2", 2, 0, marks=pytest.mark.all),
    ],
)
def test_a_killed_worker_changes_neither_the_state_nor_what_is_printed(
    tmp_path: Path, layout: str, arguments: str, fault: str, source: int, teller: int
) -> None:
    words = [*SHORT, *arguments.split()]
    disturbed, printed = train(layout, words, teller, tmp_path / "disturbed", "--standby", "1", "--chaos", fault)
    undisturbed, printed_in_peace = train(layout, words, teller, tmp_path / "undisturbed")

    assert [f"{f.kind} {f.rank} {f.phase} {f.step}" for f in disturbed.failures] == [
        fault.replace("kill rank", "killed").replace("in ", "").replace("of step ", "")
    ]
    assert [recovery.sources for recovery in disturbed.recoveries] == [(source,)]
    assert undisturbed.failures == ()
    assert disturbed.steps == undisturbed.steps == 4
    assert disturbed.final_state_digest == undisturbed.final_state_digest != ""
    assert disturbed.final_lineage == undisturbed.final_lineage != ""
    assert any("step 4: loss" in line for line in printed)
    assert printed == printed_in_peace


def train(layout: str, words: list[str], teller: int, run_dir: Path, *flags: str) -> tuple[JobReport, list[str]]:
    """Run an example on four ranks to its end: the report, and the lines that one rank printed."""
    command = [sys.executable, "-m", "relight.cli", "run", "--nproc-per-node", "4", "--run-dir", str(run_dir), *flags]
    printed = run_until(DEADLINE_SECONDS, [*command, str(EXAMPLES / layout / "train.py"), *words])
    report = decode_report((run_dir / "report.json").read_bytes())
    return report, [line for line in printed.splitlines() if line.startswith(f"[rank {teller}]")]
