"""A socket in TLS for two threads: one sends while the other receives, which an ssl.SSLSocket alone does not bear.

Each call into the TLS library is made under a lock and never waits there; what has to wait, waits outside it.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

_JOINED_BYTES = 2**14  # of small pieces that go into one record


class TlsSocket:
    """The methods of a socket that `TcpChannel` needs, after the handshake."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._timeout_seconds: float | None = None
        self._lock = threading.Lock()

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_seconds = seconds

    def fileno(self) -> int:
        return self._connection.fileno()

    def pending(self) -> bool:
        """Return whether something has arrived that `select` does not see any more."""
        with self._lock:
            return self._connection.pending() > 0

    def recv(self, count: int) -> bytes:
        received: bytes = self._run(lambda: self._connection.recv(count))
        return received

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        """Into the first of them only."""
        return (self._run(lambda: self._connection.recv_into(views[0])),)

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Some of the first ones; returns how many bytes."""
        data: bytes | memoryview = views[0]
        if len(data) < _JOINED_BYTES and len(views) > 1:
            data = _join(views)
        sent: int = self._run(lambda: self._connection.send(data))
        return sent

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.sendmsg([view]) :]

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._connection, how)  # that of SSLSocket continues in the clear

    def close(self) -> None:
        self._connection.close()

    def _run(self, operation: Callable[[], Any]) -> Any:
        ends = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds
        while True:
            try:
                with self._lock:
                    return operation()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, ends)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, ends)

    def _wait(self, event: int, ends: float | None) -> None:
        poll = select.poll()
        poll.register(self._connection, event)
        left = None if ends is None else max(0.0, ends - time.monotonic()) * 1000
        if not poll.poll(left):
            raise TimeoutError("the other side does not go on")


def _join(views: Sequence[memoryview]) -> bytes:
    joined = bytearray()
    for view in views:
        joined += view[: _JOINED_BYTES - len(joined)]
        if len(joined) == _JOINED_BYTES:
            break
    return bytes(joined)
