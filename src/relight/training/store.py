"""The rendezvous store of a generation, kept by the controller: no rank's death can take it away.

c10d asks a store for nothing but set, wait and get while it forms a gloo group; the rest is there for scripts
that use the store directly.
"""

import threading
from datetime import timedelta

from torch._C._distributed_c10d import Store

from relight.errors import StepInterrupted
from relight.training.link import AgentLink
from relight.wire.messages import StoreAdd, StoreReply, StoreSet, StoreWait


class StoreClient:
    """Requests in flight to the controller's store, from any thread."""

    def __init__(self) -> None:
        self.link: AgentLink | None = None
        self._condition = threading.Condition()
        self._next_request = 0
        self._replies: dict[int, StoreReply] = {}
        self._closed_below = 0  # requests of older generations fail

    def reply(self, message: StoreReply) -> None:
        """Called by the link's thread."""
        with self._condition:
            self._replies[message.request] = message
            self._condition.notify_all()

    def close_below(self, generation: int) -> None:
        """Wake everyone who waits for a key of an older generation."""
        with self._condition:
            self._closed_below = max(self._closed_below, generation)
            self._condition.notify_all()

    def set(self, generation: int, key: str, value: bytes) -> None:
        self._link().send(StoreSet(generation=generation, key=key, value=value))

    def wait(self, generation: int, keys: tuple[str, ...], timeout_seconds: float | None) -> tuple[bytes, ...]:
        """Values of `keys`, once all are there. Raises StepInterrupted if the generation is closed meanwhile."""
        request = self._new_request()
        self._link().send(StoreWait(request=request, generation=generation, keys=keys))
        return self._await(request, generation, timeout_seconds).values

    def add(self, generation: int, key: str, amount: int) -> int:
        request = self._new_request()
        self._link().send(StoreAdd(request=request, generation=generation, key=key, amount=amount))
        return int(self._await(request, generation, None).values[0])

    def _link(self) -> AgentLink:
        assert self.link is not None
        return self.link

    def _new_request(self) -> int:
        with self._condition:
            self._next_request += 1
            return self._next_request

    def _await(self, request: int, generation: int, timeout_seconds: float | None) -> StoreReply:
        with self._condition:
            arrived = self._condition.wait_for(
                lambda: request in self._replies or generation < self._closed_below, timeout_seconds
            )
            reply = self._replies.pop(request, None)
        if not arrived:
            raise TimeoutError(f"a rendezvous key of generation {generation} did not appear in {timeout_seconds} s")
        if reply is None or reply.error:
            raise StepInterrupted(f"generation {generation} is closed")
        return reply


class GenerationStore(Store):
    """A c10d store whose keys belong to one generation and one group."""

    def __init__(self, client: StoreClient, generation: int, prefix: str) -> None:
        super().__init__()
        self._client = client
        self._generation = generation
        self._prefix = prefix
        self._seen: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        data = value if isinstance(value, bytes) else value.encode()
        self._client.set(self._generation, self._prefix + key, data)

    def get(self, key: str) -> bytes:
        if key not in self._seen:
            self.wait([key])
        return self._seen.pop(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if timeout is not None else None
        values = self._client.wait(self._generation, tuple(self._prefix + key for key in keys), seconds)
        self._seen.update(zip(keys, values, strict=True))

    def add(self, key: str, value: int) -> int:
        return self._client.add(self._generation, self._prefix + key, value)
