"""The connections of observers, and the notices for them."""

import asyncio
from collections import deque

import msgspec

from relight.server.network.connection import Connection
from relight.wire.messages import NoticeUpdate

MAX_UNHEARD = 100
MAX_NAMES = 100  # of observers whose place in the unheard notices is remembered


class Observers:
    """Sends notices to all observers; keeps those that no observer has received, for the next ones."""

    def __init__(self) -> None:
        self._connections: set[Connection] = set()
        self._unheard: deque[NoticeUpdate] = deque(maxlen=MAX_UNHEARD)
        self._unheard_count = 0  # including those that are no longer kept
        self._told: dict[str, int] = {}  # by observer's name: how many of them it has received, or were before it

    def __bool__(self) -> bool:
        return bool(self._connections)

    def add(self, connection: Connection, name: str) -> None:
        """Add an observer. One that comes back under its `name` does not get old notices a second time."""
        self._connections.add(connection)
        missed = self._unheard_count - self._told.pop(name, 0)
        for update in list(self._unheard)[max(0, len(self._unheard) - missed) :]:
            connection.send(update)
        self._told[name] = self._unheard_count
        if len(self._told) > MAX_NAMES:
            del self._told[next(iter(self._told))]

    def discard(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def send(self, message: msgspec.Struct) -> None:
        for connection in self._connections:
            connection.send(message)

    def tell(self, level: str, text: str) -> None:
        """Send a line for people."""
        update = NoticeUpdate(level=level, text=text)
        if not self._connections:
            self._unheard.append(update)
            self._unheard_count += 1
        self.send(update)

    def alarm(self, text: str) -> None:
        self.tell("error", text)

    async def finish(self, timeout_seconds: float) -> None:
        """Let the last words reach everyone, within `timeout_seconds`."""
        await asyncio.gather(*(connection.close(timeout_seconds) for connection in list(self._connections)))
