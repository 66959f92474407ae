"""The agent's connection to the controller."""

import asyncio
from typing import Any

import msgspec

from relight.errors import ProtocolError
from relight.wire.framing import decode, encode_frame, make_decoder, read_payload
from relight.wire.handshake import hello_mac
from relight.wire.messages import PROTOCOL_VERSION, AgentDown, Challenge, Hello, Refused, Welcome

HANDSHAKE_SECONDS = 10.0
CONGESTED_BYTES = 2**20  # beyond this, what will be said again anyway is left unsaid
MAX_UNSENT_BYTES = 64 * 2**20  # beyond this, the controller is lost
_decoder = make_decoder(AgentDown)


class Uplink:
    """Frames in both directions, after the handshake."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(
        cls, address: tuple[str, int], *, token: bytes, name: str, slots: int, processes: tuple[str, ...]
    ) -> "Uplink":
        """Connect and prove knowledge of the token. Raises OSError (TimeoutError is one) or ProtocolError."""
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            uplink = cls(*await asyncio.open_connection(*address))
            challenge = await uplink._expect(Challenge)
            if challenge.protocol_version != PROTOCOL_VERSION:
                raise ProtocolError(
                    f"the controller speaks protocol version {challenge.protocol_version}, this agent version "
                    f"{PROTOCOL_VERSION}: install the same relight on both sides"
                )
            uplink.send(
                Hello(
                    protocol_version=PROTOCOL_VERSION,
                    role="agent",
                    name=name,
                    mac=hello_mac(token, challenge.nonce, "agent", name),
                    slots=slots,
                    processes=processes,
                )
            )
            await uplink._expect(Welcome)
            return uplink

    def send(self, message: msgspec.Struct) -> None:
        """Never waits. A controller that has stopped reading loses the connection in the end."""
        if self._writer.is_closing():
            return
        self._writer.write(encode_frame(message))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()

    def congested(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > CONGESTED_BYTES

    async def receive(self) -> Any:
        """The controller's next message; None at the end. Raises ProtocolError."""
        payload = await read_payload(self._reader)
        return None if payload is None else decode(_decoder, payload)

    async def close(self, timeout_seconds: float) -> None:
        """Close once what was sent has left, or after `timeout_seconds`."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout_seconds)
        except OSError:
            self._writer.transport.abort()

    async def _expect(self, expected: type) -> Any:
        message = await self.receive()
        if isinstance(message, Refused):
            raise ProtocolError(f"the controller refused this agent: {message.reason}")
        if not isinstance(message, expected):
            raise ProtocolError(f"expected {expected.__name__} from the controller, got {type(message).__name__}")
        return message
