"""The Unix socket between the agent and its workers: who may speak, in what order, and never waiting for one."""

import asyncio
import os
import socket
import struct
from collections import deque
from pathlib import Path
from typing import Protocol, cast

from relight.errors import ProtocolError
from relight.wire.framing import decode, make_decoder, split_payloads
from relight.wire.messages import MAX_FRAME_BYTES, WorkerHello, WorkerUp

HELLO_SECONDS = 30.0
MAX_QUEUED_BYTES = 16 * 2**20  # for a worker that is frozen or not there
MAX_RELAYED_BYTES = MAX_FRAME_BYTES - 4096  # leaves room for the envelope
_READ_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_decoder = make_decoder(WorkerUp)


def listen(path: Path) -> socket.socket:
    """A socket at `path` that only this user can connect to; what a predecessor left there is removed."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


class Mailbox:
    """Frames for one worker, in order: sent if it is connected, kept until it is.

    Once a frame is lost the worker no longer knows what it was told, so nothing more is delivered: it finds its
    agent gone, and ends.
    """

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.overflowed = False
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def put(self, frame: bytes) -> None:
        if self.overflowed:
            return
        queued = self.connection.unsent_bytes() if self.connection is not None else self._waiting_bytes
        if queued + len(frame) > MAX_QUEUED_BYTES:
            self.overflowed = True
            self.close()
        elif self.connection is not None:
            self.connection.send(frame)
        else:
            self._waiting.append(frame)
            self._waiting_bytes += len(frame)

    def attach(self, connection: "Connection") -> None:
        """Deliver through `connection` from now on. Raises ProtocolError if it is too late for that."""
        if self.overflowed:
            raise ProtocolError("frames for this worker were lost: it did not read them")
        if self.connection is not None:
            self.connection.abort()
        self.connection = connection
        while self._waiting:
            connection.send(self._waiting.popleft())
        self._waiting_bytes = 0

    def detach(self, connection: "Connection") -> None:
        if self.connection is connection:
            self.connection = None

    def drain(self) -> None:
        """Take what a dead worker had written before it died."""
        if self.connection is not None:
            self.connection.drain()

    def close(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
        if self.connection is not None:
            self.connection.abort()
            self.connection = None


class Host(Protocol):
    """What a connection asks of its agent."""

    def admit(self, hello: WorkerHello, peer_pid: int) -> Mailbox:
        """The mailbox of the worker that says hello. Raises ProtocolError or OSError if it is not that worker."""

    def relay(self, process: str, payload: bytes) -> None:
        """Pass a worker's frame on."""

    def refused(self, peer_pid: int, reason: str) -> None:
        """A connection was closed for what came through it."""


class Connection(asyncio.Protocol):
    """One connection. It proves who it is, then its frames are checked and relayed."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._buffer = bytearray()
        self._process = ""
        self._peer_pid = 0
        self._mailbox: Mailbox | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self._peer_pid, _, _ = _CREDENTIALS.unpack(credentials)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HELLO_SECONDS, self._refuse, f"no hello within {HELLO_SECONDS:g} s")

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for payload in split_payloads(self._buffer):
                self._receive(payload)
        except (ProtocolError, OSError) as error:
            self._refuse(str(error))

    def connection_lost(self, _error: Exception | None) -> None:
        self._deadline.cancel()
        if self._mailbox is not None:
            self._mailbox.detach(self)

    def send(self, frame: bytes) -> None:
        self._transport.write(frame)

    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        self._transport.abort()

    def drain(self) -> None:
        """Handle all that has arrived, without waiting for the loop to find it."""
        descriptor = self._transport.get_extra_info("socket").fileno()
        while not self._transport.is_closing():
            try:
                data = os.read(descriptor, _READ_BYTES)
            except OSError:  # EAGAIN: that was all
                return
            if not data:
                return
            self.data_received(data)

    def _receive(self, payload: bytes) -> None:
        if len(payload) > MAX_RELAYED_BYTES:
            raise ProtocolError(f"a message of {len(payload)} bytes is over {MAX_RELAYED_BYTES}")
        message = decode(_decoder, payload)
        if self._mailbox is None:
            if not isinstance(message, WorkerHello):
                raise ProtocolError(f"{type(message).__name__} before WorkerHello")
            self._mailbox = self._host.admit(message, self._peer_pid)
            self._mailbox.attach(self)
            self._process = message.process
            self._deadline.cancel()
        elif isinstance(message, WorkerHello) or getattr(message, "process", self._process) != self._process:
            raise ProtocolError(f"{self._process} speaks for another process")
        else:
            self._host.relay(self._process, payload)

    def _refuse(self, reason: str) -> None:
        self._buffer.clear()
        self._host.refused(self._peer_pid, reason)
        self._transport.abort()
