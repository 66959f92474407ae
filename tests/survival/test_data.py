"""Jobs whose data comes in the shapes that people write: a lost rank's replacement draws what it would have drawn."""

import pytest

from tests.survival.harness import Bench, Training
from tests.survival.judge import check_survived

FAULTS = ("kill rank 0 in FORWARD of step 5", "kill rank 1 in BACKWARD of step 14")


@pytest.mark.parametrize("kind", ["own", "two", "workers", pytest.param("stateful", marks=pytest.mark.all)])
def test_the_replacement_draws_the_same_data(bench: Bench, kind: str) -> None:
    training = Training(ranks=2, steps=20, program="augmenting.py", arguments=("--data", kind))
    check_survived(bench.run(training, faults=FAULTS, standbys=2), bench.reference(training))
