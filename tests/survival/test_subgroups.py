"""Process groups that a script chooses by the rank of the moment, or has chosen before: both follow the rank."""

import re

import pytest

from tests.survival.harness import Bench, Outcome, Training
from tests.survival.judge import check_faults, check_survived

# The standby was built as rank 3: it holds groups that rank 3 is not in, and takes ranks that are in those.
KILLS = ["kill rank 0 in BACKWARD of step 1", "kill rank 1 in BACKWARD of step 3"]


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("--loop",), marks=pytest.mark.all)], ids=["chosen", "all of them"]
)
def test_groups_follow_the_rank(bench: Bench, arguments: tuple[str, ...]) -> None:
    training = Training(ranks=4, steps=6, program="subgroups.py", arguments=arguments)
    outcome, reference = bench.run(training, faults=KILLS, standbys=2), bench.reference(training)
    check_survived(outcome, reference)
    check_faults(outcome, KILLS)
    assert sorted(re.findall("took rank .*", logs(outcome))) == ["took rank 0, 0, 0", "took rank 1, 1, 1"]
    assert "took rank" not in reference.stdout


def logs(outcome: Outcome) -> str:
    return "".join(path.read_text() for path in sorted((outcome.run_dir / "logs").iterdir()))
