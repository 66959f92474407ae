"""State that scripts carry from step to step by themselves is there in a replacement, and undone with its step."""

import pytest

from tests.programs.carrying import SHAPES
from tests.survival.harness import Bench, Training
from tests.survival.judge import check_faults, check_survived

STEPS = 9
ALWAYS = ("trainer",)


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape in ALWAYS else pytest.mark.all) for shape in SHAPES]
)
def test_is_carried_into_replacements(bench: Bench, shape: str) -> None:
    training = Training(ranks=2, steps=STEPS, program="carrying.py", arguments=("--shape", shape))
    faults = ("kill rank 1 in BACKWARD of step 3", "kill rank 0 in OPTIMIZER of step 6")
    outcome = bench.run(training, faults=faults, standbys=2)
    check_survived(outcome, bench.reference(training))
    check_faults(outcome, faults)
