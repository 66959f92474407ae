"""Rendezvous keys of the current generation: how its members find each other to form a process group.

Everything carries the generation, so a process that slept through a recovery meets no other: its requests are
answered with an error, and nothing that it sets can be seen by the new group.

The store lives in memory only. A restarted controller asks every worker to say again what it had put there (StoreLost).
"""

from collections.abc import Callable, Iterable

import msgspec

from relight.wire.messages import StoreAdd, StoreRecall, StoreReply, StoreSet, StoreWait

MAX_STORE_BYTES = 64 * 2**20  # of one generation, keys and values
MAX_WAITS = 65536


class _Wait(msgspec.Struct, frozen=True):
    process: str
    request: StoreWait


class Store:
    """Answers go out through `reply(process, message)`; only the asking process gets its own keys."""

    def __init__(self, reply: Callable[[str, StoreReply], None]) -> None:
        self._reply = reply
        self._generation = 0
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waits: dict[str, list[_Wait]] = {}  # by the first of their keys that is missing: ranks wait in thousands
        self._waiting = 0  # how many there are
        self._added: dict[tuple[str, int], int] = {}  # process and request: the value it was answered with
        self._to_recall: set[str] = set()  # processes that may have counted what is forgotten here
        self._held: list[tuple[str, StoreAdd]] = []  # until all of those have said so

    @property
    def generation(self) -> int:
        return self._generation

    def open(self, generation: int) -> None:
        """Close the current generation and open a newer one; opening the current one again changes nothing."""
        if generation <= self._generation:
            return
        waits = [wait for filed in self._waits.values() for wait in filed]
        self._waits, self._waiting = {}, 0
        self._generation = generation
        self._values.clear()
        self._bytes = 0
        self._added.clear()
        self._to_recall.clear()
        held, self._held = self._held, []
        for wait in waits:
            self._refuse(wait.process, wait.request.request, wait.request.generation)
        for process, request in held:
            self._refuse(process, request.request, request.generation)

    def recall(self, processes: Iterable[str]) -> None:
        """All was lost, and these processes were asked to say again what they knew: until then nothing is counted."""
        self._to_recall = set(processes)

    def recalled(self, process: str, message: StoreRecall) -> None:
        """A process has said again all that it had set; this is what it had added."""
        if message.generation == self._generation and process in self._to_recall:
            for key, amount in sorted(message.added.items()):
                self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
                self._answer_waits(key)
        self._note_recalled(process)

    def _note_recalled(self, process: str) -> None:
        self._to_recall.discard(process)
        if not self._to_recall:
            held, self._held = self._held, []
            for adder, request in held:
                self.add(adder, request)

    def set(self, process: str, message: StoreSet) -> str:
        """Store a value; returns an empty string, or why it was not stored (there is no reply to a set)."""
        if message.generation != self._generation:
            return ""  # a latecomer: it learns that its generation is closed from its next request
        grown = len(message.value) - len(self._values.get(message.key, b"")) + len(message.key)
        if self._bytes + grown > MAX_STORE_BYTES:
            return f"{process} wanted to put more than {MAX_STORE_BYTES} bytes into the rendezvous store"
        self._bytes += grown
        self._values[message.key] = message.value
        self._answer_waits(message.key)
        return ""

    def add(self, process: str, message: StoreAdd) -> None:
        if message.generation != self._generation:
            self._refuse(process, message.request, message.generation)
            return
        if self._to_recall:
            self._held.append((process, message))
            return
        counted = self._added.get((process, message.request))
        if counted is not None:  # said again, since the answer may have been lost
            self._reply(process, StoreReply(request=message.request, values=(str(counted).encode(),)))
            return
        try:
            value = int(self._values.get(message.key, b"0")) + message.amount
        except ValueError:
            error = f"the value of {message.key!r} is not a number"
            self._reply(process, StoreReply(request=message.request, values=(), error=error))
            return
        self._added[process, message.request] = value
        self._values[message.key] = str(value).encode()
        self._reply(process, StoreReply(request=message.request, values=(self._values[message.key],)))
        self._answer_waits(message.key)

    def wait(self, process: str, message: StoreWait) -> None:
        if message.generation != self._generation:
            self._refuse(process, message.request, message.generation)
        elif self._waiting >= MAX_WAITS:
            error = f"more than {MAX_WAITS} requests wait in the rendezvous store"
            self._reply(process, StoreReply(request=message.request, values=(), error=error))
        else:
            self._answer(_Wait(process, message))

    def forget(self, process: str) -> None:
        """Drop the requests of a process that is gone."""
        self._waits = {
            key: left for key, filed in self._waits.items() if (left := [w for w in filed if w.process != process])
        }
        self._waiting = sum(len(filed) for filed in self._waits.values())
        self._held = [(adder, request) for adder, request in self._held if adder != process]
        self._added = {key: value for key, value in self._added.items() if key[0] != process}
        self._note_recalled(process)

    def _answer_waits(self, key: str) -> None:
        """The key is there now."""
        waits = self._waits.pop(key, [])
        self._waiting -= len(waits)
        for wait in waits:
            self._answer(wait)

    def _answer(self, wait: _Wait) -> None:
        """At once, or when the first key that is missing is there."""
        request = wait.request
        missing = next((key for key in request.keys if key not in self._values), None)
        if missing is None:
            values = tuple(self._values[key] for key in request.keys)
            self._reply(wait.process, StoreReply(request=request.request, values=values))
        else:
            self._waits.setdefault(missing, []).append(wait)
            self._waiting += 1

    def _refuse(self, process: str, request: int, generation: int) -> None:
        error = f"generation {generation} is closed; the current one is {self._generation}"
        self._reply(process, StoreReply(request=request, values=(), error=error))
