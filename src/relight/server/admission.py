"""The accepting side of the handshake: which connections may speak to the controller."""

import asyncio
import collections
import secrets

from relight.errors import ProtocolError
from relight.server.connection import Connection
from relight.wire.framing import decode, make_decoder
from relight.wire.handshake import NAME, ROLES, check_mac, welcome_mac
from relight.wire.messages import PROTOCOL_VERSION, Challenge, Hello, Refused, Welcome
from relight.wire.settings import JobSettings, encode_settings
from relight.wire.streams import read_payload
from relight.wire.tls import Tls

HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 512  # connections that have not proved themselves yet
MAX_HELLO_BYTES = 64 * 1024
_NONCE_BYTES = 32
_hello_decoder = make_decoder(Hello)


class Admission:
    """Admits peers that prove that they know the job's token; every other is told why it is refused, and cut off."""

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
