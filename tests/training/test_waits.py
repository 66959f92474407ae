"""Waits for others, and the threads in which they happen."""

import threading

from relight.training.collectives.waits import Waiters, Waits

DEADLINE_SECONDS = 20.0


class Sign:
    """Keeps what was shown."""

    def __init__(self) -> None:
        self.shown: list[bool] = []

    def show_waiting(self, waiting: bool) -> None:
        self.shown.append(waiting)


def test_a_rank_waits_as_long_as_any_operation_is_under_way() -> None:
    sign = Sign()
    waits, shown = Waits(sign), sign.shown
    first, second = waits.begin(), waits.begin()
    first()
    assert shown[-1] is True
    second()
    assert shown[-1] is False
    second()  # however often its end is told
    assert shown[-1] is False


def test_operations_of_an_older_generation_do_not_count() -> None:
    sign = Sign()
    waits, shown = Waits(sign), sign.shown
    old = waits.begin()
    waits.forget()
    assert shown[-1] is False
    waits.begin()
    old()
    assert shown[-1] is True


def test_nobody_is_told_where_ranks_count_collectives() -> None:
    waits = Waits()
    waits.begin()()
    waits.forget()


def test_waiting_threads_are_used_again() -> None:
    waiters = Waiters()
    names: list[str] = []
    for _ in range(20):
        done = threading.Event()

        def wait(done: threading.Event = done) -> None:
            names.append(threading.current_thread().name + str(threading.get_ident()))
            done.set()

        waiters.run(wait)
        assert done.wait(DEADLINE_SECONDS)
    assert len(set(names)) < 20


def test_one_that_is_stuck_delays_no_other() -> None:
    waiters = Waiters()
    never, done = threading.Event(), threading.Event()

    def stuck() -> None:
        never.wait()

    waiters.run(stuck)
    waiters.run(done.set)
    assert done.wait(DEADLINE_SECONDS)
    never.set()
