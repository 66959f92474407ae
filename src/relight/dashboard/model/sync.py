"""Keeps a page in step with the job by sending only what has changed. Pure.

Everything has the number of the round in which it changed last. A page that names the round it has seen gets what is
newer than that, however long it was away: nothing is queued for anyone, so a slow page costs no memory.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

Value = Any
Key = TypeVar("Key")
_encoder = msgspec.json.Encoder()


class Sync:
    """The newest value of each topic and of each rank's line."""

    def __init__(self, life: str) -> None:
        """`life` names this process: rounds of another one mean nothing here."""
        self.life = life
        self.round = 0
        self._topics: dict[str, tuple[int, bytes]] = {}
        self._ranks: dict[int, tuple[int, bytes]] = {}

    def update(self, topics: Mapping[str, Value], ranks: Mapping[int, Value]) -> bool:
        """Take the present values; returns whether anything is new."""
        number = self.round + 1
        changed = _merge(self._topics, topics, number)
        changed |= _merge(self._ranks, ranks, number)
        if changed:
            self.round = number
        return changed

    def seen(self, event_id: str) -> int:
        """The round of an event's id; 0, nothing at all, if it is not one of ours."""
        life, _, number = event_id.partition(":")
        if life != self.life or not (number.isascii() and number.isdigit()):
            return 0
        return min(int(number[:18]), self.round)

    def since(self, seen: int) -> bytes:
        """A JSON object with what changed after round `seen`; `whole` is true if that is everything."""
        topics = [b'"%s":%s' % (name.encode(), text) for name, (at, text) in self._topics.items() if at > seen]
        ranks = [text for _, (at, text) in sorted(self._ranks.items()) if at > seen]
        whole = b'"whole":%s' % (b"true" if seen == 0 else b"false")
        return b"{" + b",".join([whole, *topics, b'"ranks":[%s]' % b",".join(ranks)]) + b"}"

    def event(self, seen: int, now_ns: int, known_ns: int) -> bytes:
        """One server-sent event: the changes since `seen`, with the time of the job's clock."""
        clock = b'"now_ns":%d,"known_ns":%d,' % (now_ns, known_ns)
        return b"id: %s:%d\ndata: {%s%s\n\n" % (self.life.encode(), self.round, clock, self.since(seen)[1:])


def _merge(store: dict[Key, tuple[int, bytes]], values: Mapping[Key, Value], number: int) -> bool:
    changed = False
    for key, value in values.items():
        text = _encoder.encode(value)
        known = store.get(key)
        if known is None or known[1] != text:
            store[key] = (number, text)
            changed = True
    return changed
