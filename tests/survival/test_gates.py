"""A backward pass that reduces nothing for long is left as soon as a failure elsewhere closes its generation."""

import pytest

from tests.programs.long_backward import LONG_STEP, THROUGH
from tests.survival.harness import Bench, Training
from tests.survival.judge import check_survived

STEP = 3
TRAINING = Training(ranks=2, steps=STEP + 3, program="long_backward.py")


@pytest.mark.parametrize(
    "faults",
    [pytest.param([], marks=pytest.mark.all), ["kill rank 1 in BACKWARD of step 1"]],
    ids=["at first", "after a recovery"],
)
def test_a_long_backward_pass_is_left_early(bench: Bench, faults: list[str]) -> None:
    struck = [*faults, f"kill rank 1 in FORWARD of step {STEP}"]
    outcome = bench.run(TRAINING, faults=struck, standbys=len(struck), environment={LONG_STEP: str(STEP)})
    check_survived(outcome, bench.reference(TRAINING))
    assert len(outcome.report.recoveries) == len(struck), outcome.describe()
    assert not (outcome.run_dir.parent / THROUGH).exists()
