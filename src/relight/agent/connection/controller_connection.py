"""A connection to the controller, from an agent's side or an observer's."""

import asyncio
from typing import Any

import msgspec

from relight.errors import ProtocolError
from relight.wire.connection.framing import decode, make_decoder
from relight.wire.connection.handshake import CONTROLLER, ConnectingSide, check_version
from relight.wire.connection.keepalive import CONTROL, Keepalive, end_when_silent
from relight.wire.connection.streams import FrameStream, read_payload
from relight.wire.connection.tls import BROKEN_OFF, NO_TLS_HERE, NO_TLS_THERE, Tls, explain, start_tls
from relight.wire.messages import AgentDown, Challenge, Hello, Refused, StartTls, Welcome

HANDSHAKE_SECONDS = 10.0
CONGESTED_BYTES = 2**20  # beyond this, what will be said again anyway is left unsaid
_decoder = make_decoder(AgentDown)


class ControllerConnection(FrameStream):
    """Frames in both directions, after the handshake."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[Any]
    ) -> None:
        super().__init__(reader, writer)
        self._decoder = decoder

    @classmethod
    async def connect(
        cls,
        address: tuple[str, int],
        token: bytes,
        hello: Hello,
        *,
        tls: Tls | None = None,
        server_name: str = "",
        decoder: msgspec.msgpack.Decoder[Any] = _decoder,
        keepalive: Keepalive = CONTROL,
    ) -> tuple["ControllerConnection", Welcome]:
        """Connect, and prove to each other knowledge of the token; `hello` lacks only the proof.

        With `tls`, the controller must also have a certificate for `server_name` (default: the address's host).
        `decoder` is of what it may say. Raises OSError (TimeoutError is one) or ProtocolError.
        """
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            controller_connection = cls(*await asyncio.open_connection(*address), decoder)
            try:
                await controller_connection._begin(tls, server_name or address[0], keepalive)
                return controller_connection, await controller_connection._shake_hands(token, hello)
            except BaseException:
                controller_connection.abort()
                raise

    async def _begin(self, tls: Tls | None, server_name: str, keepalive: Keepalive) -> None:
        """Begin TLS if this side wants it. Raises ProtocolError if the other side does not."""
        connection = self.writer.get_extra_info("socket")
        if connection.getsockname() == connection.getpeername():
            raise OSError("no process listens there")  # on a free port above 32768, TCP may connect to itself
        end_when_silent(connection, keepalive)
        if tls is None:
            return
        check_version(await self._expect(StartTls))
        try:
            self.reader, self.writer = await start_tls(
                self.writer, tls.client(), server_name=server_name, timeout_seconds=HANDSHAKE_SECONDS
            )
        except OSError as error:
            raise ProtocolError(f"the controller cannot be trusted: {explain(error, 'its')}") from error

    async def _shake_hands(self, token: bytes, hello: Hello) -> Welcome:
        challenge: Challenge = await self._expect(Challenge)
        handshake = ConnectingSide(token)
        self.send(handshake.answer(challenge, hello))
        welcome: Welcome = await self._expect(Welcome)
        handshake.check(welcome.mac, CONTROLLER, welcome.job)
        return welcome

    def congested(self) -> bool:
        return self.unsent_bytes() > CONGESTED_BYTES

    async def receive(self) -> Any:
        """The controller's next message; None at the end. Raises ProtocolError."""
        payload = await read_payload(self.reader)
        return None if payload is None else decode(self._decoder, payload)

    async def _expect(self, expected: type) -> Any:
        message = await self.receive()
        if isinstance(message, expected):
            return message
        match message:
            case Refused(again=True):
                raise ConnectionAbortedError(message.reason)  # as without an answer: worth another try
            case Refused():
                raise ProtocolError(f"the controller refused this agent: {message.reason}")
            case StartTls():
                raise ProtocolError(f"the controller is reached, but {NO_TLS_HERE}")
            case Challenge() if expected is StartTls:
                raise ProtocolError(f"the controller is reached, but {NO_TLS_THERE}")
            case None if self.writer.get_extra_info("sslcontext") is not None and expected is Challenge:
                raise ProtocolError(f"the controller hung up: {BROKEN_OFF}")
            case None:  # it may be dying, or not listen yet while a proxy before it does
                raise ConnectionResetError(f"the process that listens there hung up before {expected.__name__}")
        raise ProtocolError(f"the controller said {type(message).__name__} instead of {expected.__name__}")
