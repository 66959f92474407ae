"""A rank's own work in a phase, without what it waits for others."""

from relight.training.work import WorkClock


def test_all_of_a_phase_without_collectives_is_work() -> None:
    clock = WorkClock()
    clock.begin(100)
    assert clock.done_ns(400, until_launch=False) == 300
    assert clock.done_ns(400, until_launch=True) == 300


def test_in_backward_it_ends_with_the_last_launch() -> None:
    clock = WorkClock()
    clock.begin(100)
    clock.launched(200)
    clock.launched(300)
    clock.waited(500)  # at the end, for the slowest
    assert clock.done_ns(900, until_launch=True) == 200


def test_waits_in_between_do_not_count() -> None:
    clock = WorkClock()
    clock.begin(100)
    clock.launched(150)
    clock.waited(100)
    clock.launched(300)
    assert clock.done_ns(900, until_launch=True) == 100
    assert clock.done_ns(900, until_launch=False) == 700


def test_each_phase_begins_anew() -> None:
    clock = WorkClock()
    clock.begin(100)
    clock.launched(200)
    clock.waited(50)
    clock.begin(1000)
    assert clock.done_ns(1250, until_launch=True) == 250
