"""One authenticated TCP connection, and the handshake that a stranger must pass to get one."""

import asyncio
import collections
import contextlib
import secrets

import msgspec

from relight.errors import ProtocolError
from relight.wire.framing import decode, encode_frame, make_decoder, read_payload
from relight.wire.handshake import NAME, ROLES, check_mac, welcome_mac
from relight.wire.keepalive import notice_silence
from relight.wire.messages import PROTOCOL_VERSION, Challenge, Hello, Refused, StartTls, Welcome
from relight.wire.settings import JobSettings, encode_settings
from relight.wire.tls import Tls, explain, start_tls

HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 512  # connections that have not proved themselves yet
MAX_HELLO_BYTES = 64 * 1024
MAX_QUEUED_BYTES = 64 * 2**20  # a peer that does not read this much is cut off
_NONCE_BYTES = 32
_hello_decoder = make_decoder(Hello)


class Connection:
    """Sends without waiting. A peer that has stopped reading loses its connection, not our memory."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        self.host, self.peer = _describe_peer(writer)
        notice_silence(writer.get_extra_info("socket"))

    async def start_tls(self, tls: Tls, timeout_seconds: float) -> None:
        """Tell the peer to, and go on in TLS. Raises ProtocolError: it has no certificate that counts here."""
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
    """Where it comes from: its address, and the same with the port, for people."""
    address = writer.get_extra_info("peername")
    return (str(address[0]), f"{address[0]}:{address[1]}") if isinstance(address, tuple) else ("", "an unknown peer")


class Gate:
    """Lets peers in that prove they know the job's token; everyone else is told why not, and cut off."""

    def __init__(
        self,
        token: bytes,
        settings: JobSettings,
        tls: Tls | None = None,
        deadline_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._token = token
        self._settings = settings
        self._tls = tls
        self.life = secrets.token_hex(8)  # names this run of the controller
        self._deadline_seconds = deadline_seconds
        self._strangers: dict[Connection, asyncio.Timeout] = {}  # oldest first, with what ends their handshake

    def welcome(self, connection: Connection, hello: Hello, life: str = "", received: int = 0) -> None:
        """The last word of the handshake, and our own proof. `life`, `received`: see wire.outbox."""
        mac = welcome_mac(self._token, hello.nonce, self._settings.job)
        settings = encode_settings(self._settings)
        connection.send(
            Welcome(job=self._settings.job, mac=mac, settings=settings, life=life or self.life, received=received)
        )

    async def admit(self, connection: Connection) -> Hello | str:
        """Run the handshake up to `welcome`. Returns the peer's Hello, or the reason for which it was refused.

        However many connect and say nothing, the next one is heard: it takes the place of the one that has waited
        longest, of those from the address that most of them come from. A peer that knows the token needs its place for
        milliseconds.
        """
        refused = Refused(reason="")
        try:
            async with asyncio.timeout(self._deadline_seconds) as patience:
                if len(self._strangers) >= MAX_STRANGERS:
                    self._turn_out_one()
                self._strangers[connection] = patience
                if self._tls is not None:
                    await connection.start_tls(self._tls, self._deadline_seconds)
                return await self._challenge(connection)
        except TimeoutError:
            if connection in self._strangers:
                refused = Refused(reason=f"no valid Hello within {self._deadline_seconds:g} s")
            else:
                reason = f"more than {MAX_STRANGERS} connections wait to be authenticated; try again"
                refused = Refused(reason=reason, again=True)
        except ProtocolError as error:
            refused = Refused(reason=str(error))
        finally:
            self._strangers.pop(connection, None)
        connection.send(refused)
        return refused.reason

    def _turn_out_one(self) -> None:
        crowd = collections.Counter(connection.host for connection in self._strangers)
        host = crowd.most_common(1)[0][0]
        oldest = next(connection for connection in self._strangers if connection.host == host)
        patience = self._strangers.pop(oldest)
        if not patience.expired():  # this very moment
            patience.reschedule(0.0)

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
