"""docs/PROTOCOL.md is what the code says, and the list of invariants is that of the judges."""

import re
import subprocess
import sys
from pathlib import Path

from relight.sim.judge.invariants import INVARIANTS
from relight.sim.search.golden import read_golden

REPOSITORY = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    """If it is not: python docs/protocol_page.py, and read the difference."""
    command = [sys.executable, "docs/protocol_page.py", "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_invariant_that_is_judged_is_listed_and_no_other() -> None:
    code = "".join(path.read_text() for path in (REPOSITORY / "src" / "relight" / "sim").rglob("*.py"))
    judged = set(re.findall(r"[\"`]([IL][0-9]+): ", code))
    assert judged == set(INVARIANTS)


def test_what_recorded_schedules_break_is_listed() -> None:
    broken = {read_golden(path).breaks for path in (Path(__file__).parent / "regressions").glob("*.txt")}
    assert broken - {""} <= set(INVARIANTS)
