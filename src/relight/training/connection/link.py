"""The worker's connection to its agent. A lost agent may come back: the worker waits for it, and gives up at last."""

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import msgspec

from relight.errors import ProtocolError
from relight.training.output import tell
from relight.wire.connection.framing import decode, encode_frame, make_decoder
from relight.wire.connection.streams import receive_payload
from relight.wire.messages import WorkerDown, WorkerHello

_RETRY_SECONDS = 0.05


class LinkListener(Protocol):
    """Handles what arrives, on the link's thread. Must not block."""

    def receive(self, message: msgspec.Struct) -> None:
        """A message arrived."""

    def reconnected(self) -> None:
        """Another agent is connected: send again what the one before may have lost, except for the last report."""


class AgentLink:
    """Frames to and from the agent."""

    def __init__(self, path: str, process: str, patience_seconds: float, listener: LinkListener) -> None:
        """Connect to the agent's socket at `path`. Raises OSError. `listener` is called after `start`."""
        self._path = path
        self._process = process
        self._patience_seconds = patience_seconds
        self._listener = listener
        self._lock = threading.Lock()
        self._decoder = make_decoder(WorkerDown)
        self._last_report: bytes | None = None
        self._connection = self._connect()
        self._closing = False

    def start(self) -> None:
        """Begin to receive, once the listener is ready."""
        threading.Thread(target=self._run, name="relight-link", daemon=True).start()

    def send(self, message: msgspec.Struct, *, report: bool = False) -> None:
        """Send one message. A `report` is said again to an agent that was restarted: the old one may have lost it."""
        frame = encode_frame(message)
        with self._lock:
            if report:
                self._last_report = frame
            try:
                self._connection.sendall(frame)
            except OSError:
                # The receiving thread notices too, reconnects, and repeats the last report.
                return

    def close(self) -> None:
        """Say no more; the end of the stream is expected from now on."""
        self._closing = True

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(None)  # the script may have set a default for its downloads
        try:
            connection.connect(self._path)
            connection.sendall(encode_frame(WorkerHello(process=self._process, pid=os.getpid())))
        except OSError:
            connection.close()
            raise
        return connection

    def _run(self) -> None:
        while True:
            try:
                payload = receive_payload(self._connection)
                if payload is not None:
                    self._contained(self._listener.receive, decode(self._decoder, payload))
                    continue
            except (OSError, ProtocolError) as error:
                tell(f"relight: connection to the agent: {error}")
            if self._closing:
                return
            self._reconnect()
            self._contained(self._listener.reconnected)

    def _contained(self, call: Callable[..., None], *arguments: msgspec.Struct) -> None:
        """Nothing that is done about one message may keep this worker from hearing the next."""
        try:
            call(*arguments)
        except Exception:
            tell(f"relight: on the link's thread:\n{traceback.format_exc()}")

    def _reconnect(self) -> None:
        deadline = time.monotonic() + self._patience_seconds
        while time.monotonic() < deadline:
            try:
                self._adopt(self._connect())
            except OSError:  # also from an agent that died after it had accepted the connection
                time.sleep(_RETRY_SECONDS)
                continue
            return
        tell(f"relight: no agent for {self._patience_seconds:g} s; this worker ends")
        os._exit(70)

    def _adopt(self, connection: socket.socket) -> None:
        """Speak through this connection from now on, and say the last report again."""
        with self._lock:
            self._connection.close()
            self._connection = connection
            if self._last_report is not None:
                connection.sendall(self._last_report)
