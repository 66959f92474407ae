"""The accepting side of the handshake: which connections may speak to the controller."""

import asyncio
import collections
import secrets
from dataclasses import dataclass

from relight.errors import ProtocolError
from relight.server.network.connection import Connection
from relight.wire.connection.framing import decode, make_decoder
from relight.wire.connection.handshake import CONTROLLER, ROLES, ListeningSide
from relight.wire.connection.streams import read_payload
from relight.wire.connection.tls import Tls
from relight.wire.messages import Hello, Refused, Welcome
from relight.wire.settings import JobSettings, encode_settings

HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 512  # connections that have not proved themselves yet
MAX_HELLO_BYTES = 64 * 1024
_hello_decoder = make_decoder(Hello)


@dataclass(frozen=True)
class Peer:
    """A peer that has proved that it knows the token, and the controller's own proof for it."""

    hello: Hello
    proof: bytes


class Admission:
    """Admits peers that prove that they know the job's token. All others get the reason, and are cut off."""

    def __init__(self, token: bytes, settings: JobSettings, tls: Tls | None = None) -> None:
        self._token = token
        self._settings = settings
        self._tls = tls
        self.life = secrets.token_hex(8)  # names this run of the controller
        self._strangers: dict[Connection, asyncio.Timeout] = {}  # oldest first, with what ends their handshake

    def welcome(self, connection: Connection, peer: Peer, life: str = "", received: int = 0) -> None:
        """Send the last message of the handshake, with this side's proof. `life`, `received`: see wire/connection."""
        settings = encode_settings(self._settings)
        connection.send(
            Welcome(
                job=self._settings.job, mac=peer.proof, settings=settings, life=life or self.life, received=received
            )
        )

    async def admit(self, connection: Connection) -> Peer | str:
        """Run the handshake up to `welcome`; return the peer, or the reason for which it was refused.

        However many connect and say nothing, the next one is heard: it takes the place of the one that has waited
        longest, of those from the address that most of them come from. A peer that knows the token needs its place for
        milliseconds.
        """
        refused = Refused(reason="")
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS) as patience:
                if len(self._strangers) >= MAX_STRANGERS:
                    self._turn_out_one()
                self._strangers[connection] = patience
                if self._tls is not None:
                    await connection.start_tls(self._tls, HANDSHAKE_SECONDS)
                return await self._challenge(connection)
        except TimeoutError:
            if connection in self._strangers:
                refused = Refused(reason=f"no valid Hello within {HANDSHAKE_SECONDS:g} s")
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

    async def _challenge(self, connection: Connection) -> Peer:
        handshake = ListeningSide(self._token)
        connection.send(handshake.challenge())
        payload = await read_payload(connection.reader, MAX_HELLO_BYTES)
        if payload is None:
            raise ProtocolError("the peer hung up before its Hello")
        hello: Hello = decode(_hello_decoder, payload)
        handshake.check(hello, ROLES, named=True)
        return Peer(hello, handshake.proof(hello, CONTROLLER, self._settings.job))
