"""An agent as the server knows it: the processes it runs, and what it has to be told, also while it is away."""

import msgspec

from relight.core.commands import Spawn
from relight.server.connection import Connection

MAX_KEPT_MESSAGES = 10_000  # for an agent that is away; it is given up after `agent_timeout_seconds` anyway


class Agent:
    """Outlives its connections: orders that come up while the agent is away are kept until it is back."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.running: set[str] = set()  # ordered to start and not known to have ended
        self._connection: Connection | None = None
        self._kept: list[msgspec.Struct] = []

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def send(self, message: msgspec.Struct) -> None:
        if self._connection is not None:
            self._connection.send(message)
        elif len(self._kept) < MAX_KEPT_MESSAGES:
            self._kept.append(message)

    def attach(self, connection: Connection, live: tuple[str, ...]) -> tuple[str, ...]:
        """The agent is (back) here with these live processes. Returns those that ended without a word about it.

        A newer connection takes over from an older one: an agent that came back knows better than we do whether
        its old connection is dead.
        """
        if self._connection is not None:
            self._connection.abort()
        self._connection = connection
        kept, self._kept = self._kept, []
        coming = {message.process for message in kept if isinstance(message, Spawn)}
        for message in kept:
            connection.send(message)
        return tuple(sorted(self.running - set(live) - coming))

    def detach(self, connection: Connection) -> bool:
        """This connection ended. False if a newer one has taken over already."""
        if self._connection is not connection:
            return False
        self._connection = None
        return True

    def abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()
