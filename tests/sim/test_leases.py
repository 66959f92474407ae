"""A Lease that several processes want: two never act at a moment, and each planted bug is found."""

import pytest

from relight.core.lease import Read, Record, Stage, Tenure, Write
from relight.sim.model.contents import Violation
from relight.sim.planted.leases import LEASES
from relight.sim.timed.leases import LeaseWorld

SEEDS = 1500


def run_all(build: type[Tenure] = Tenure, seeds: int = SEEDS) -> int:
    """Run these seeds, from 0; return how often the Lease has moved, or was taken for the first time."""
    terms = 0
    for seed in range(seeds):
        world = LeaseWorld(seed, build)
        world.run()
        terms += len(world.terms)
    return terms


@pytest.mark.parametrize("seeds", [300, pytest.param(SEEDS, marks=pytest.mark.all)])
def test_two_never_act_and_somebody_does_in_the_end(seeds: int) -> None:
    assert run_all(seeds=seeds) > 2 * seeds


@pytest.mark.parametrize("planted", LEASES, ids=[planted.__name__ for planted in LEASES])
def test_a_planted_bug_is_found(planted: type[Tenure]) -> None:
    with pytest.raises(Violation, match="two act"):
        run_all(planted)


def acquired(now: float) -> Tenure:
    tenure = Tenure("a", 15.0)
    assert tenure.advance(now) == Read()
    tenure.take_record(Record("1", "", 15.0), now)
    assert tenure.advance(now) == Write("1", "a")
    tenure.take_success("2", now)
    return tenure


def test_a_free_lease_is_taken_at_once_and_renewed() -> None:
    tenure = acquired(100.0)
    assert tenure.may_act(109.9)
    assert not tenure.may_act(110.0)
    assert tenure.advance(101.0) is None
    assert tenure.advance(tenure.next_at) == Write("2", "a")
    tenure.take_success("3", 102.5)
    assert tenure.may_act(111.0)


def test_a_holder_that_was_paused_for_too_long_never_acts_again() -> None:
    tenure = acquired(100.0)
    assert tenure.advance(130.0) is None
    assert tenure.stage is Stage.OVER
    tenure = acquired(100.0)
    assert tenure.advance(105.0) == Write("2", "a")
    tenure.take_success("3", 130.0)  # the answer came, but by now another one may hold it
    assert tenure.stage is Stage.OVER


def test_a_silent_holder_is_waited_for_as_long_as_its_record_says() -> None:
    tenure = Tenure("b", 15.0)
    tenure.advance(0.0)
    tenure.take_record(Record("7", "a", 20.0), 0.0)
    assert tenure.advance(19.0) == Read()
    tenure.take_record(Record("7", "a", 20.0), 19.0)
    assert tenure.next_at == 20.0
    assert tenure.advance(20.0) == Write("7", "b")
    tenure.take_conflict(20.0)  # the holder, or another one, was first
    assert tenure.advance(20.0) == Read()
    tenure.take_record(Record("8", "a", 20.0), 20.0)
    assert tenure.advance(39.0) == Read()


def test_a_lease_that_is_released_is_free() -> None:
    tenure = acquired(0.0)
    assert tenure.release() == Write("2", "")
    assert not tenure.may_act(0.0)
    assert Tenure("b", 15.0).release() is None
