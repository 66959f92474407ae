"""Bits that change by themselves: found by comparing replicas, and repaired from the majority."""

import pytest

from tests.survival.harness import Bench, Training
from tests.survival.judge import check_protocol, check_survived

VERIFY = ("--verify-every", "2")


# With DDP's own broadcast of buffers, rank 0's would be everybody's before anybody could compare.
@pytest.mark.parametrize(
    ("what", "rank", "arguments"),
    [
        ("flip-parameter", 0, ()),
        ("flip-optimizer", 2, ()),
        pytest.param("flip-buffer", 1, ("--local-buffers",), marks=pytest.mark.all),
    ],
)
def test_a_bit_that_flips_in_a_step_that_is_verified_is_as_if_it_had_not(
    bench: Bench, what: str, rank: int, arguments: tuple[str, ...]
) -> None:
    training = Training(steps=7, arguments=arguments)
    outcome = bench.run(training, faults=[f"{what} rank {rank} in FORWARD of step 4"], flags=VERIFY)
    check_survived(outcome, bench.reference(training))
    (failure,) = outcome.report.failures
    assert (failure.kind, failure.rank, failure.step, failure.phase) == ("corruption", rank, 4, "BARRIER")
    (recovery,) = outcome.report.recoveries
    assert (recovery.replaced, recovery.target_version) == ((rank,), 4)


def test_a_bit_that_flips_between_two_comparisons_is_found_at_the_next(bench: Bench) -> None:
    """Its gradients have entered the step before; but from the comparison on all ranks hold the same again."""
    outcome = bench.run(Training(), faults=["flip-parameter rank 1 in FORWARD of step 3"], flags=VERIFY)
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    (failure,) = outcome.report.failures
    assert (failure.kind, failure.rank, failure.step) == ("corruption", 1, 4)
    assert len({final["parameters"] for final in outcome.finals.values()}) == 1
    assert len(outcome.finals) == 3
    assert not check_protocol(outcome), outcome.describe()


@pytest.mark.all
def test_a_bit_that_flips_after_the_last_comparison_is_found_at_the_end(bench: Bench) -> None:
    outcome = bench.run(Training(), faults=["flip-parameter rank 1 in FORWARD of step 5"])
    assert (outcome.status, outcome.report.error) == (0, ""), outcome.describe()
    (failure,) = outcome.report.failures
    assert (failure.kind, failure.rank) == ("corruption", 1)
    assert len({final["parameters"] for final in outcome.finals.values()}) == 1


def test_two_ranks_cannot_tell_who_is_right(bench: Bench) -> None:
    outcome = bench.run(Training(ranks=2), faults=["flip-parameter rank 1 in FORWARD of step 4"], flags=VERIFY)
    assert outcome.status == 1, outcome.describe()
    assert "the state of version 4 differs between rank 0; rank 1, and no majority" in outcome.report.error
    assert "Resume from your last checkpoint" in outcome.stderr
