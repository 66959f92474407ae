"""The store of a generation, asked by a worker over a real link: answers, closed generations, lost controllers."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from relight.errors import StepInterrupted
from relight.training.connection.store import GenerationStore, StoreClient
from relight.wire.messages import StoreAdd, StoreLost, StoreRecall, StoreReply, StoreSet, StoreWait
from tests.training.agent_end import DEADLINE_SECONDS, AgentEnd


class Worker(AgentEnd):
    """A store over that link."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, self)
        self.store = StoreClient(self.link)
        self.link.start()

    # --- the worker's end (LinkListener) ------------------------------------------------------------------------------
    def receive(self, message: msgspec.Struct) -> None:
        if isinstance(message, StoreLost):
            self.store.say_again(lost=True)
        elif isinstance(message, StoreReply):
            self.store.reply(message)

    def reconnected(self) -> None:
        self.store.say_again(lost=False)

    # --- the agent's end ----------------------------------------------------------------------------------------------
    def asks(self, generation: int, *keys: str) -> tuple["Future[tuple[bytes, ...]]", int]:
        """A request that is under way, and its number."""
        asked = self.pool.submit(self.store.wait, generation, keys, DEADLINE_SECONDS)
        request = self.heard()
        assert (request.generation, request.keys) == (generation, keys)
        return asked, request.request

    def adds(self, generation: int, key: str, amount: int) -> tuple["Future[int]", int]:
        asked = self.pool.submit(self.store.add, generation, key, amount)
        return asked, self.heard().request


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    with contextlib.closing(Worker(tmp_path / "agent.sock")) as made:
        yield made


def test_values_are_those_of_the_keys_that_were_asked_for(worker: Worker) -> None:
    first, one = worker.asks(1, "a", "b")
    second, two = worker.asks(1, "c")
    worker.says(StoreReply(request=two, values=(b"3",)))
    worker.says(StoreReply(request=one, values=(b"1", b"2")))
    assert first.result(DEADLINE_SECONDS) == (b"1", b"2")
    assert second.result(DEADLINE_SECONDS) == (b"3",)


def test_a_generation_that_is_closed_wakes_who_waits_for_it_alone(worker: Worker) -> None:
    old, _ = worker.asks(1, "a")
    new, number = worker.asks(2, "a")
    worker.store.close_below(2)
    with pytest.raises(StepInterrupted, match="generation 1 is closed"):
        old.result(DEADLINE_SECONDS)
    worker.says(StoreReply(request=number, values=(b"x",)))
    assert new.result(DEADLINE_SECONDS) == (b"x",)
    with pytest.raises(StepInterrupted):
        worker.store.wait(1, ("a",), DEADLINE_SECONDS)


def test_a_controller_that_closed_the_generation_says_so(worker: Worker) -> None:
    asked, number = worker.asks(1, "a")
    worker.says(StoreReply(request=number, values=(), error="closed"))
    with pytest.raises(StepInterrupted):
        asked.result(DEADLINE_SECONDS)


def test_a_key_that_does_not_appear_is_waited_for_so_long(worker: Worker) -> None:
    with pytest.raises(TimeoutError, match=r"a rendezvous key of generation 3 did not appear in 0\.01 s"):
        worker.store.wait(3, ("a",), 0.01)
    number = worker.heard().request
    asked, other = worker.asks(3, "b")
    worker.says(StoreReply(request=number, values=(b"late",)))  # no request waits for it any more
    worker.says(StoreReply(request=other, values=(b"b",)))
    assert asked.result(DEADLINE_SECONDS) == (b"b",)


def test_the_agents_successor_hears_what_the_agent_may_have_lost(worker: Worker) -> None:
    worker.store.set(1, "mine", b"v")
    assert worker.heard() == StoreSet(generation=1, key="mine", value=b"v")
    asked, number = worker.asks(1, "other")
    worker.dies()
    assert worker.heard() == StoreSet(generation=1, key="mine", value=b"v")
    assert worker.heard() == StoreWait(request=number, generation=1, keys=("other",))
    worker.says(StoreReply(request=number, values=(b"o",)))
    assert asked.result(DEADLINE_SECONDS) == (b"o",)
    worker.dies()
    assert worker.heard() == StoreSet(generation=1, key="mine", value=b"v")
    worker.store.set(1, "next", b"")
    assert worker.heard() == StoreSet(generation=1, key="next", value=b""), "an answered request is not said again"


def test_a_new_controller_hears_what_was_put_and_added_in_the_newest_generation(worker: Worker) -> None:
    worker.store.set(1, "old", b"1")
    worker.heard()
    for amount in (2, 5):
        asked, number = worker.adds(2, "count", amount)
        worker.says(StoreReply(request=number, values=(str(amount).encode(),)))
        worker.says(StoreReply(request=number, values=(b"99",)))  # said twice, by two controllers, say
        assert asked.result(DEADLINE_SECONDS) == amount
    open_one, number = worker.adds(2, "count", 1)
    worker.store.close_below(2)
    worker.says(StoreLost())
    assert worker.heard() == StoreRecall(generation=2, added={"count": 7})
    assert worker.heard() == StoreAdd(request=number, generation=2, key="count", amount=1)
    worker.says(StoreReply(request=number, values=(b"8",)))
    assert open_one.result(DEADLINE_SECONDS) == 8


def test_groups_of_one_generation_do_not_see_each_others_keys(worker: Worker) -> None:
    store = GenerationStore(worker.store, 4, "group 1/")
    store.set("rank", "here")
    assert worker.heard() == StoreSet(generation=4, key="group 1/rank", value=b"here")
    asked = worker.pool.submit(store.wait, ["a", "b"], timedelta(seconds=DEADLINE_SECONDS))
    request = worker.heard()
    assert request.keys == ("group 1/a", "group 1/b")
    worker.says(StoreReply(request=request.request, values=(b"1", b"2")))
    asked.result(DEADLINE_SECONDS)
    assert (store.get("b"), store.get("a")) == (b"2", b"1"), "what was waited for is not asked for again"
