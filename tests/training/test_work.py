"""A rank's own work in a phase, without what it waits for others."""

import pytest

from relight.training.connection.work import WorkClock


def begun(now_ns: int) -> WorkClock:
    """A clock whose phase began then."""
    clock = WorkClock()
    clock.turn(now_ns, until_launch=False)
    return clock


@pytest.mark.parametrize("until_launch", [False, True])
def test_all_of_a_phase_without_collectives_is_work(until_launch: bool) -> None:
    assert begun(100).turn(400, until_launch=until_launch) == 300


def test_in_backward_it_ends_with_the_last_launch() -> None:
    clock = begun(100)
    clock.launched(200)
    clock.launched(300)
    clock.waited(500)  # at the end, for the slowest
    assert clock.turn(900, until_launch=True) == 200


@pytest.mark.parametrize(("until_launch", "worked_ns"), [(True, 100), (False, 700)])
def test_waits_in_between_do_not_count(until_launch: bool, worked_ns: int) -> None:
    clock = begun(100)
    clock.launched(150)
    clock.waited(100)
    clock.launched(300)
    assert clock.turn(900, until_launch=until_launch) == worked_ns


def test_each_phase_begins_anew() -> None:
    clock = begun(100)
    clock.launched(200)
    clock.waited(50)
    clock.turn(1000, until_launch=True)
    assert clock.turn(1250, until_launch=True) == 250
