"""One TCP connection of the controller to an agent or an observer."""

import asyncio

from relight.errors import ProtocolError
from relight.wire.connection.keepalive import CONTROL, Keepalive, end_when_silent, silence_seconds
from relight.wire.connection.streams import FrameStream
from relight.wire.connection.tls import Tls, explain, start_tls
from relight.wire.messages import PROTOCOL_VERSION, StartTls


class Connection(FrameStream):
    """Frames to a peer whose address is known."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keepalive: Keepalive = CONTROL
    ) -> None:
        super().__init__(reader, writer)
        self.host, self.peer = _describe_peer(writer)
        self._keepalive = keepalive
        end_when_silent(writer.get_extra_info("socket"), keepalive)

    def silent_seconds(self) -> float:
        """Return for how long the peer's host had been silent when the connection ended; see `silence_seconds`."""
        return silence_seconds(self.reader.exception(), self._keepalive)

    async def start_tls(self, tls: Tls, timeout_seconds: float) -> None:
        """Continue in TLS, after StartTls. Raises ProtocolError if the peer's certificate is not accepted."""
        self.send(StartTls(protocol_version=PROTOCOL_VERSION))
        try:
            self.reader, self.writer = await start_tls(
                self.writer, tls.server(), server_name=None, timeout_seconds=timeout_seconds
            )
        except OSError as error:
            raise ProtocolError(explain(error, "the peer's")) from error


def _describe_peer(writer: asyncio.StreamWriter) -> tuple[str, str]:
    """Return the address of the peer, and the same with the port, for people."""
    address = writer.get_extra_info("peername")
    return (str(address[0]), f"{address[0]}:{address[1]}") if isinstance(address, tuple) else ("", "an unknown peer")
