"""One TCP connection of the controller to an agent or an observer."""

import asyncio
import contextlib

import msgspec

from relight.errors import ProtocolError
from relight.wire.connection.framing import encode_frame
from relight.wire.connection.keepalive import CONTROL, end_when_silent
from relight.wire.connection.tls import Tls, explain, start_tls
from relight.wire.messages import PROTOCOL_VERSION, StartTls

MAX_QUEUED_BYTES = 64 * 2**20  # a peer that does not read this much is cut off


class Connection:
    """Sends without waiting. A peer that has stopped reading loses its connection, not our memory."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        self.host, self.peer = _describe_peer(writer)
        end_when_silent(writer.get_extra_info("socket"), CONTROL)

    async def start_tls(self, tls: Tls, timeout_seconds: float) -> None:
        """Continue in TLS, after StartTls. Raises ProtocolError if the peer's certificate is not accepted."""
        self.send(StartTls(protocol_version=PROTOCOL_VERSION))
        try:
            self.reader, self._writer = await start_tls(
                self._writer, tls.server(), server_name=None, timeout_seconds=timeout_seconds
            )
        except OSError as error:
            raise ProtocolError(explain(error, "the peer's")) from error

    def send(self, message: msgspec.Struct) -> None:
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(frame)
        if self._writer.transport.get_write_buffer_size() > MAX_QUEUED_BYTES:
            self._writer.transport.abort()

    async def finish(self, timeout_seconds: float) -> None:
        """Close once what was sent has left, or after `timeout_seconds`."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), timeout_seconds)
        self._writer.transport.abort()

    def abort(self) -> None:
        self._writer.transport.abort()


def _describe_peer(writer: asyncio.StreamWriter) -> tuple[str, str]:
    """Return the address of the peer, and the same with the port, for people."""
    address = writer.get_extra_info("peername")
    return (str(address[0]), f"{address[0]}:{address[1]}") if isinstance(address, tuple) else ("", "an unknown peer")
