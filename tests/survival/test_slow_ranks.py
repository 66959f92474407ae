"""A rank that is slower than its peers: named with evidence, and replaced between two steps if that was asked for."""

import pytest

from tests.survival.harness import Bench, Training
from tests.survival.judge import check_protocol, check_survived

WINDOWS = ("--slow-window-seconds", "0.6")  # three of them in a row
SLOW = "slow rank 1 in FORWARD of step 3"
TRAINING = Training(steps=40, arguments=("--pause", "0.02"))


def test_a_slow_rank_is_replaced_between_two_steps(bench: Bench) -> None:
    outcome = bench.run(TRAINING, faults=[SLOW], flags=(*WINDOWS, "--replace-slow"))
    check_survived(outcome, bench.reference(TRAINING))
    (failure,) = outcome.report.failures
    assert (failure.kind, failure.rank, failure.phase) == ("slow", 1, "OUTSIDE")
    assert "most of it in FORWARD" in failure.evidence
    (recovery,) = outcome.report.recoveries
    assert recovery.replaced == (1,)


@pytest.mark.all
@pytest.mark.parametrize("place", ["BACKWARD", "OPTIMIZER"])
def test_a_rank_that_is_slow_elsewhere_is_named_and_those_that_wait_for_it_are_not(bench: Bench, place: str) -> None:
    outcome = bench.run(TRAINING, faults=[f"slow rank 2 in {place} of step 3"], flags=WINDOWS)
    assert (outcome.status, outcome.report.failures) == (0, ()), outcome.describe()
    (notice,) = (text for text in outcome.report.notices if "is slow" in text)
    assert notice.startswith("rank 2 is slow, and all others wait for it: ")
    assert f"most of it in {place}" in notice
    assert not check_protocol(outcome), outcome.describe()
