"""The agent's connection to the controller."""

import asyncio
import hmac
import secrets
from typing import Any

import msgspec

from relight.errors import ProtocolError
from relight.wire.framing import decode, encode_frame, make_decoder, read_payload
from relight.wire.handshake import hello_mac, welcome_mac
from relight.wire.keepalive import notice_silence
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
    async def connect(cls, address: tuple[str, int], token: bytes, hello: Hello) -> tuple["Uplink", Welcome]:
        """Connect, and prove to each other knowledge of the token; `hello` lacks only the proof.

        Raises OSError (TimeoutError is one) or ProtocolError.
        """
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            uplink = cls(*await asyncio.open_connection(*address))
            try:
                return uplink, await uplink._shake_hands(token, hello)
            except BaseException:
                uplink._writer.transport.abort()
                raise

    async def _shake_hands(self, token: bytes, hello: Hello) -> Welcome:
        connection = self._writer.get_extra_info("socket")
        if connection.getsockname() == connection.getpeername():
            raise OSError("nobody listens there")  # on a free port above 32768, TCP may connect to itself
        notice_silence(connection)
        challenge: Challenge = await self._expect(Challenge)
        if challenge.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the controller speaks protocol version {challenge.protocol_version}, this agent version "
                f"{PROTOCOL_VERSION}: install the same relight on both sides"
            )
        nonce = secrets.token_bytes(32)
        mac = hello_mac(token, challenge.nonce, hello.role, hello.name)
        self.send(encode_frame(msgspec.structs.replace(hello, nonce=nonce, mac=mac)))
        welcome: Welcome = await self._expect(Welcome)
        if not hmac.compare_digest(welcome.mac, welcome_mac(token, nonce, welcome.job)):
            raise ProtocolError("whoever listens there does not know this job's token: it is not our controller")
        return welcome

    def send(self, frame: bytes) -> None:
        """Never waits. A controller that has stopped reading loses the connection in the end."""
        if self._writer.is_closing():
            return
        self._writer.write(frame)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()

    def congested(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > CONGESTED_BYTES

    async def receive(self) -> Any:
        """The controller's next message; None at the end. Raises ProtocolError."""
        payload = await read_payload(self._reader)
        return None if payload is None else decode(_decoder, payload)

    def abort(self) -> None:
        self._writer.transport.abort()

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
            said = "hung up" if message is None else f"said {type(message).__name__}"
            raise ProtocolError(f"the controller {said} instead of {expected.__name__}")
        return message
