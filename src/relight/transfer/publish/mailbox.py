"""Work that other threads hand to a thread that waits in a selector."""

import contextlib
import queue
import selectors
import socket
from collections.abc import Callable


class Mailbox:
    """Calls that one thread is to make, posted by any thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        """Register with `selector`, whose thread calls the data of each registration that is ready."""
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakes)

    def post(self, work: Callable[[], None]) -> None:
        """Have `work` called soon, from any thread; after `close` nothing calls it."""
        self._posted.put(work)
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"x")

    def run_posted(self) -> None:
        """Call everything that was posted."""
        while not self._posted.empty():
            self._posted.get()()

    def close(self) -> None:
        """Close the sockets; the selector must have been closed."""
        self._wake_reader.close()
        self._wake_writer.close()

    def _drain_wakes(self, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._wake_reader.recv(4096)) == 4096:
                pass
