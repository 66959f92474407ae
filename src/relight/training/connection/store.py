"""The rendezvous store of a generation, kept by the controller: no rank's death can take it away.

c10d asks a store for nothing but set, wait and get while it forms a gloo group; the rest is there for scripts
that use the store directly.
"""

import threading
from datetime import timedelta

from relight.errors import StepInterrupted
from relight.training.connection.link import AgentLink
from relight.training.torch_private.distributed.c10d import Store
from relight.wire.messages import StoreAdd, StoreRecall, StoreReply, StoreSet, StoreWait


class StoreClient:
    """Requests in flight to the controller's store, from any thread.

    The store does not outlive its controller, and a request may be lost with an agent, so what this worker has put
    there in the current generation, and what it still waits for, is remembered here and said again.
    """

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._condition = threading.Condition()
        self._next_request = 0
        self._replies: dict[int, StoreReply] = {}
        self._closed_below = 0  # requests of older generations fail
        self._values: dict[tuple[int, str], bytes] = {}  # set by this worker: generation and key
        self._added: dict[tuple[int, str], int] = {}
        self._open: dict[int, StoreWait | StoreAdd] = {}  # requests without an answer

    def reply(self, message: StoreReply) -> None:
        """Called by the link's thread."""
        with self._condition:
            request = self._open.pop(message.request, None)
            if request is None:
                return  # answered twice, or not waited for any more
            if isinstance(request, StoreAdd) and not message.error:
                key = (request.generation, request.key)
                self._added[key] = self._added.get(key, 0) + request.amount
            self._replies[message.request] = message
            self._condition.notify_all()

    def say_again(self, *, lost: bool) -> None:
        """A new agent or, if the store was `lost`, a new controller: say what may not have arrived. For the link."""
        with self._condition:
            values, added, requests = dict(self._values), dict(self._added), list(self._open.values())
            newest = max((generation for generation, _ in (*values, *added)), default=self._closed_below)
        for (generation, key), value in values.items():
            self._link.send(StoreSet(generation=generation, key=key, value=value))
        if lost:
            totals = {key: amount for (generation, key), amount in added.items() if generation == newest}
            self._link.send(StoreRecall(generation=newest, added=totals))
        for request in requests:
            self._link.send(request)

    def close_below(self, generation: int) -> None:
        """Wake everyone who waits for a key of an older generation."""
        with self._condition:
            self._closed_below = max(self._closed_below, generation)
            self._values = {name: value for name, value in self._values.items() if name[0] >= self._closed_below}
            self._added = {name: value for name, value in self._added.items() if name[0] >= self._closed_below}
            self._open = {n: asked for n, asked in self._open.items() if asked.generation >= self._closed_below}
            self._condition.notify_all()

    def set(self, generation: int, key: str, value: bytes) -> None:
        with self._condition:
            if generation >= self._closed_below:
                self._values[generation, key] = value
        self._link.send(StoreSet(generation=generation, key=key, value=value))

    def wait(self, generation: int, keys: tuple[str, ...], timeout_seconds: float | None) -> tuple[bytes, ...]:
        """Values of `keys`, once all are there. Raises StepInterrupted if the generation is closed meanwhile."""
        message = StoreWait(request=self._new_number(), generation=generation, keys=keys)
        return self._ask(message, timeout_seconds).values

    def add(self, generation: int, key: str, amount: int) -> int:
        """Add to a counter; returns its new value. Raises StepInterrupted as `wait` does."""
        message = StoreAdd(request=self._new_number(), generation=generation, key=key, amount=amount)
        return int(self._ask(message, None).values[0])

    def _new_number(self) -> int:
        with self._condition:
            self._next_request += 1
            return self._next_request

    def _ask(self, message: StoreWait | StoreAdd, timeout_seconds: float | None) -> StoreReply:
        number, generation = message.request, message.generation
        with self._condition:
            self._open[number] = message
        self._link.send(message)
        with self._condition:
            arrived = self._condition.wait_for(
                lambda: number in self._replies or generation < self._closed_below, timeout_seconds
            )
            self._open.pop(number, None)
            reply = self._replies.pop(number, None)
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
