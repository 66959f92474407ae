"""Rendezvous keys belong to one generation."""

import msgspec

from relight.server.network.store import MAX_STORE_BYTES, Store
from relight.wire.messages import StoreAdd, StoreReply, StoreSet, StoreWait


class Desk:
    """A store with its replies written down."""

    def __init__(self) -> None:
        self.replies: list[tuple[str, StoreReply]] = []
        self.store = Store(lambda process, reply: self.replies.append((process, reply)))
        self.store.open(1)

    def set(self, key: str, value: bytes, generation: int = 1) -> str:
        return self.store.set("w0", StoreSet(generation=generation, key=key, value=value))

    def wait(self, request: int, *keys: str, process: str = "w1", generation: int = 1) -> None:
        self.store.wait(process, StoreWait(request=request, generation=generation, keys=keys))

    def add(self, request: int, key: str, amount: int, generation: int = 1) -> None:
        self.store.add("w2", StoreAdd(request=request, generation=generation, key=key, amount=amount))

    def take(self) -> list[tuple[str, StoreReply]]:
        replies, self.replies = self.replies, []
        return replies


def test_a_wait_is_answered_when_its_keys_are_there_and_with_them_alone() -> None:
    desk = Desk()
    desk.set("other", b"no business of w1")
    desk.wait(7, "b", "a")
    desk.set("a", b"1")
    assert desk.take() == []
    desk.set("b", b"2")
    assert desk.take() == [("w1", StoreReply(request=7, values=(b"2", b"1")))]
    desk.set("a", b"3")
    assert desk.take() == []  # answered once
    desk.wait(8, "a")
    assert desk.take() == [("w1", StoreReply(request=8, values=(b"3",)))]


def test_a_counter() -> None:
    desk = Desk()
    desk.wait(1, "arrived")
    desk.add(2, "arrived", 1)
    desk.add(3, "arrived", 2)
    assert desk.take() == [
        ("w2", StoreReply(request=2, values=(b"1",))),
        ("w1", StoreReply(request=1, values=(b"1",))),
        ("w2", StoreReply(request=3, values=(b"3",))),
    ]


def test_adding_to_what_is_no_number() -> None:
    desk = Desk()
    desk.set("address", b"host:1")
    desk.add(1, "address", 1)
    [(_, reply)] = desk.take()
    assert "not a number" in reply.error


def test_closing_a_generation_answers_its_waits_at_once() -> None:
    desk = Desk()
    desk.wait(1, "never")
    desk.store.open(2)
    [(process, reply)] = desk.take()
    assert (process, reply.request, reply.values) == ("w1", 1, ())
    assert reply.error == "generation 1 is closed; the current one is 2"


def test_nothing_of_another_generation_has_an_effect() -> None:
    desk = Desk()
    desk.set("a", b"old")
    desk.store.open(2)
    desk.set("a", b"late", generation=1)
    desk.set("a", b"early", generation=3)
    desk.wait(1, "a", generation=2)
    assert desk.take() == []
    for generation in (1, 3):
        desk.wait(2, "a", generation=generation)
        desk.add(3, "n", 1, generation=generation)
        assert [reply.error for _, reply in desk.take()] == [
            f"generation {generation} is closed; the current one is 2"
        ] * 2
    desk.set("a", b"new", generation=2)
    assert desk.take() == [("w1", StoreReply(request=1, values=(b"new",)))]


def test_an_older_generation_is_never_opened_again() -> None:
    desk = Desk()
    desk.store.open(3)
    desk.store.open(2)
    desk.store.open(3)
    assert desk.store.generation == 3


def test_what_a_dead_process_waited_for_is_forgotten() -> None:
    desk = Desk()
    desk.wait(1, "a", process="w1")
    desk.wait(2, "a", process="w3")
    desk.store.forget("w1")
    desk.set("a", b"1")
    assert [process for process, _ in desk.take()] == ["w3"]


def test_the_store_is_bounded() -> None:
    desk = Desk()
    assert desk.set("a", bytes(MAX_STORE_BYTES // 2)) == ""
    assert desk.set("a", bytes(MAX_STORE_BYTES // 2)) == ""  # the same key again: no more than before
    assert "more than" in desk.set("b", bytes(MAX_STORE_BYTES // 2 + 1))
    desk.store.open(2)
    assert desk.set("b", bytes(MAX_STORE_BYTES // 2 + 1), generation=2) == ""


def test_replies_survive_the_wire() -> None:
    reply = StoreReply(request=1, values=(b"\x00\xff",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=StoreReply) == reply
