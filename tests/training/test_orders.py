"""Orders on their way from the link thread to the main thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from relight.core.protocol.commands import Assign, Stop
from relight.core.worker.events import Ordered
from relight.core.worker.worker import Worker
from relight.training.process.controller.orders import Orders

Told = list[tuple[str, str]]


def stop(generation: int) -> Stop:
    return Stop(why="", generation=generation)


@pytest.fixture
def told() -> Told:
    return []


@pytest.fixture
def orders(told: Told) -> Orders:
    """The orders of rank 1 in generation 1."""
    worker = Worker(1, is_standby=False, until=10)
    orders = Orders(worker, lambda name, error: told.append((name, str(error))))
    orders.receive(Assign(why="", process="w1", rank=1, generation=1))
    orders.await_ready()
    orders.handle(Ordered())
    return orders


def test_a_stop_closes_everything_once(orders: Orders) -> None:
    closed: list[int] = []
    orders.at_close += [lambda: closed.append(1), lambda: closed.append(2)]
    orders.receive(stop(2))
    orders.receive(stop(2))
    assert closed == [1, 2]
    assert not orders.is_current(1)
    assert orders.is_current(2)
    assert orders.stop_arrived_ns > 0


def test_one_that_cannot_be_closed_does_not_keep_the_others_open(orders: Orders, told: Told) -> None:
    closed: list[int] = []

    def breaks() -> None:
        raise OSError("no such socket")

    orders.at_close += [breaks, lambda: closed.append(2)]
    orders.receive(stop(2))
    assert closed == [2]
    assert [text for _, text in told] == ["no such socket"]


def test_a_wait_for_stop_ends_with_it(orders: Orders) -> None:
    with ThreadPoolExecutor(1) as main:
        waits = main.submit(orders.await_stop, 10.0)
        orders.receive(stop(2))
        assert waits.result(10.0)


def test_without_a_stop_the_wait_ends_at_its_deadline(orders: Orders) -> None:
    assert not orders.await_stop(0.01)
