"""Jobs whose data comes in the shapes that people write: a lost rank's replacement draws what it would have drawn."""

import pytest

from relight.core.account.verdict import NOT_KNOWN
from tests.survival.harness import Bench, Training
from tests.survival.judge import check_protocol, check_survived

FAULTS = ("kill rank 0 in FORWARD of step 5", "kill rank 1 in BACKWARD of step 14")


@pytest.mark.parametrize(
    "kind",
    ["own", pytest.param("two", marks=pytest.mark.all), "workers", pytest.param("stateful", marks=pytest.mark.all)],
)
def test_the_replacement_draws_the_same_data(bench: Bench, kind: str) -> None:
    training = Training(ranks=2, steps=20, program="augmenting.py", arguments=("--data", kind))
    check_survived(bench.run(training, faults=FAULTS, standbys=2), bench.reference(training))


@pytest.mark.all
def test_a_loader_that_was_not_handed_over_makes_the_bits_doubtful(bench: Bench) -> None:
    """It is read too rarely to be refused in the first steps; a replacement begins it anew."""
    training = Training(ranks=2, steps=20, program="augmenting.py", arguments=("--data", "stray"))
    outcome = bench.run(training, faults=["kill rank 1 in FORWARD of step 11"])
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    assert "rank 0: the script draws from a DataLoader that relight.Training does not know" in outcome.stderr
    assert outcome.report.bits_as_undisturbed == NOT_KNOWN, outcome.describe()
    (doubt,) = outcome.report.doubts
    assert (doubt.rank, "reads on in an iterator" in doubt.reason) == (0, True), outcome.describe()
    assert not check_protocol(outcome), outcome.describe()
    assert bench.reference(training).report.bits_as_undisturbed == "yes"
