"""One authenticated TCP connection, and the handshake that a stranger must pass to get one."""

import asyncio
import contextlib
import secrets

import msgspec

from relight.errors import ProtocolError
from relight.wire.framing import decode, encode_frame, make_decoder, read_payload
from relight.wire.handshake import NAME, ROLES, check_mac, welcome_mac
from relight.wire.keepalive import notice_silence
from relight.wire.messages import PROTOCOL_VERSION, Challenge, Hello, Refused, Welcome
from relight.wire.settings import JobSettings, encode_settings

HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 32  # connections that have not proved themselves yet
MAX_HELLO_BYTES = 64 * 1024
MAX_QUEUED_BYTES = 64 * 2**20  # a peer that does not read this much is cut off
_NONCE_BYTES = 32
_hello_decoder = make_decoder(Hello)


class Connection:
    """Sends without waiting. A peer that has stopped reading loses its connection, not our memory."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        notice_silence(writer.get_extra_info("socket"))

    @property
    def peer(self) -> str:
        """Its address, for people."""
        address = self._writer.get_extra_info("peername")
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "an unknown peer"

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


class Gate:
    """Lets peers in that prove they know the job's token; everyone else is told why not, and cut off."""

    def __init__(self, token: bytes, settings: JobSettings, deadline_seconds: float = HANDSHAKE_SECONDS) -> None:
        self._token = token
        self._settings = settings
        self.life = secrets.token_hex(8)  # names this run of the controller
        self._deadline_seconds = deadline_seconds
        self._strangers = 0

    def welcome(self, connection: Connection, hello: Hello, life: str = "", received: int = 0) -> None:
        """The last word of the handshake, and our own proof. `life`, `received`: see wire.outbox."""
        mac = welcome_mac(self._token, hello.nonce, self._settings.job)
        settings = encode_settings(self._settings)
        connection.send(
            Welcome(job=self._settings.job, mac=mac, settings=settings, life=life or self.life, received=received)
        )

    async def admit(self, connection: Connection) -> Hello | str:
        """Run the handshake up to `welcome`. Returns the peer's Hello, or the reason for which it was refused."""
        if self._strangers >= MAX_STRANGERS:
            reason = f"more than {MAX_STRANGERS} connections wait to be authenticated; try again later"
            connection.send(Refused(reason=reason))
            return reason
        self._strangers += 1
        try:
            async with asyncio.timeout(self._deadline_seconds):
                hello = await self._challenge(connection)
        except TimeoutError:
            reason = f"no valid Hello within {self._deadline_seconds:g} s"
        except ProtocolError as error:
            reason = str(error)
        else:
            return hello
        finally:
            self._strangers -= 1
        connection.send(Refused(reason=reason))
        return reason

    async def _challenge(self, connection: Connection) -> Hello:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.send(Challenge(protocol_version=PROTOCOL_VERSION, nonce=nonce))
        payload = await read_payload(connection.reader, MAX_HELLO_BYTES)
        if payload is None:
            raise ProtocolError("the peer hung up before it said who it is")
        hello: Hello = decode(_hello_decoder, payload)
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer speaks protocol version {hello.protocol_version}, this controller version "
                f"{PROTOCOL_VERSION}: install the same relight on both sides"
            )
        if hello.role not in ROLES or not NAME.fullmatch(hello.name):
            raise ProtocolError(f"{hello.role[:64]!r} {hello.name[:64]!r} is no valid role and name")
        if not check_mac(self._token, nonce, hello.role, hello.name, hello.mac):
            raise ProtocolError("the peer does not know this job's token")
        return hello
