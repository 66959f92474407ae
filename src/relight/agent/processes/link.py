"""The Unix socket between the agent and its workers: admits each worker once, and never waits for one."""

import asyncio
import os
import socket
import struct
from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec

from relight.errors import ProtocolError
from relight.wire.connection.framing import decode, make_decoder, split_payloads
from relight.wire.messages import MAX_FRAME_BYTES, WorkerHello, WorkerUp

HELLO_SECONDS = 30.0
MAX_QUEUED_BYTES = 16 * 2**20  # for a worker that is frozen or not there
MAX_RELAYED_BYTES = MAX_FRAME_BYTES - 4096  # leaves room for the envelope
_BACKLOG = 128
_ACCEPT_PAUSE_SECONDS = 1.0
_READ_BYTES = 64 * 1024
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_decoder = make_decoder(WorkerUp)


class Mailbox:
    """Frames for one worker, in order: sent if it is connected, kept until it is.

    Once a frame is lost the worker has missed an order, so nothing more is delivered: it finds its
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
            self.connection.close()
        self.connection = connection
        while self._waiting:
            connection.send(self._waiting.popleft())
        self._waiting_bytes = 0

    def detach(self, connection: "Connection") -> None:
        if self.connection is connection:
            self.connection = None

    def close(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
        if self.connection is not None:
            self.connection.close()


class Host(Protocol):
    """The part of the agent that connections of workers use."""

    def admit(self, hello: WorkerHello, peer_pid: int) -> Mailbox:
        """Return the mailbox of the worker that says hello. Raises ProtocolError or OSError if it is another one."""

    def relay(self, process: str, message: msgspec.Struct, payload: bytes) -> None:
        """Pass a worker's frame on; `message` is what is in it."""

    def refused(self, peer_pid: int, reason: str) -> None:
        """Take note of a connection that was closed for what came through it."""


class Reception:
    """Listens for workers at a path that only this user can connect to."""

    def __init__(self, path: Path, host: Host) -> None:
        """Raises OSError. What a predecessor left at `path` is removed."""
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(path))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        finally:
            os.umask(before)
        self._loop.add_reader(self._listener, self._accept)

    def drain(self, pid: int) -> None:
        """Handle all that a dead process has sent, even if its connection had not been noticed yet."""
        self._accept()
        for connection in list(self._connections):
            if connection.peer_pid == pid:
                connection.drain()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of descriptors: the listener stays readable, so look away for a while
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_PAUSE_SECONDS, self._resume)
                return
            self._connections.add(Connection(accepted, self._host, self._connections))

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)


class Connection:
    """One connection: the worker is identified, then its frames are checked and relayed."""

    def __init__(self, accepted: socket.socket, host: Host, registry: "set[Connection]") -> None:
        accepted.setblocking(False)
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.peer_pid, _, _ = _CREDENTIALS.unpack(credentials)
        self._socket = accepted
        self._host = host
        self._registry = registry
        self._received = bytearray()
        self._unsent = bytearray()
        self._process = ""
        self._mailbox: Mailbox | None = None
        self._unheard = False  # the peer does not read any more
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(accepted, self._read)
        self._deadline = self._loop.call_later(HELLO_SECONDS, self._refuse, f"no hello within {HELLO_SECONDS:g} s")

    def send(self, frame: bytes) -> None:
        """Never waits: what the socket does not take is kept."""
        if self._closed or self._unheard:
            return
        waiting = bool(self._unsent)
        self._unsent += frame
        if not waiting:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._socket, self._write)

    def unsent_bytes(self) -> int:
        return len(self._unsent)

    def drain(self) -> None:
        """Handle all that has arrived."""
        while self._read():
            pass

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._deadline.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._received.clear()
        self._unsent.clear()
        self._registry.discard(self)
        if self._mailbox is not None:
            self._mailbox.detach(self)

    def _read(self) -> bool:
        """Handle what is there, up to a limit that keeps the loop fair. False: there is nothing more."""
        if self._closed:
            return False
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._received += data
        try:
            for payload in split_payloads(self._received):
                self._receive(payload)
        except (ProtocolError, OSError) as error:
            self._refuse(str(error))
        return True

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # the worker reads no more; what it wrote before is still read
            self._unheard = True
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _receive(self, payload: bytes) -> None:
        if len(payload) > MAX_RELAYED_BYTES:
            raise ProtocolError(f"a message of {len(payload)} bytes is over {MAX_RELAYED_BYTES}")
        message = decode(_decoder, payload)
        if self._mailbox is None:
            if not isinstance(message, WorkerHello):
                raise ProtocolError(f"{type(message).__name__} before WorkerHello")
            self._mailbox = self._host.admit(message, self.peer_pid)
            self._mailbox.attach(self)
            self._process = message.process
            self._deadline.cancel()
        elif isinstance(message, WorkerHello) or getattr(message, "process", self._process) != self._process:
            raise ProtocolError(f"{self._process} speaks for another process")
        else:
            self._host.relay(self._process, message, payload)

    def _refuse(self, reason: str) -> None:
        self._host.refused(self.peer_pid, reason)
        self.close()
