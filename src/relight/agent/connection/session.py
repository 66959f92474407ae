"""The agent's connection to the controller: made, lost and made again."""

import asyncio
import random
import time
from collections.abc import Callable

import msgspec

from relight.agent.connection.controller_connection import ControllerConnection
from relight.agent.decisions.session import Session
from relight.errors import ProtocolError
from relight.wire.connection.keepalive import Keepalive
from relight.wire.connection.tls import Tls
from relight.wire.messages import StopAgent, Welcome

ADDRESS_SECONDS = 2.0  # between two looks whether the job has a controller elsewhere
MOVED_SECONDS = 0.5  # the same while no controller answers
CONFIRM_SECONDS = 0.1  # until an order is confirmed, if no report goes to the controller before
RECONNECT_SECONDS = 0.1  # between two attempts to reach a controller that is gone
RECONNECTS_PER_SECOND = 2000  # of all agents together: one controller answers no more
FLUSH_SECONDS = 2.0


class ControllerSession:
    """Sends what must arrive through whichever connection there is."""

    def __init__(
        self,
        session: Session,
        token: bytes,
        nodes: int,
        find_controller: Callable[[], tuple[str, int]],
        say: Callable[[str], None],
        *,
        tls: Tls | None,
        server_name: Callable[[tuple[str, int]], str],
        keepalive: Keepalive,
    ) -> None:
        self._session = session
        self._token = token
        self._crowd_seconds = nodes / RECONNECTS_PER_SECOND
        self._find_controller = find_controller
        self._say = say
        self._tls = tls
        self._server_name = server_name
        self._keepalive = keepalive
        self._connection: ControllerConnection | None = None
        self._address = ("", 0)
        self._confirming: asyncio.TimerHandle | None = None

    @property
    def connected(self) -> bool:
        """True if there is a connection."""
        return self._connection is not None

    async def connect(self, live: Callable[[], tuple[str, ...]]) -> str:
        """Find the controller, which may be starting; return why it was given up, or an empty string."""
        begun = time.monotonic()
        while True:
            address = self._address = await asyncio.to_thread(self._find_controller)
            try:
                found = await self._try(address, live)
                if found is None:
                    begun = time.monotonic()  # there is a controller: it needs as much time as any
                    continue
                self._connection, welcome = found
            except (OSError, ProtocolError) as error:
                evidence = f"no connection to {address[0]}:{address[1]}: {str(error) or type(error).__name__}"
                refused = isinstance(error, ProtocolError)
            else:
                for frame in self._session.begin(welcome):
                    self._connection.send_frame(frame)
                return ""
            given_up = self._session.why_given_up(evidence, time.monotonic() - begun, refused=refused)
            if given_up:
                return given_up
            await asyncio.sleep(RECONNECT_SECONDS + 2 * self._crowd_seconds * random.random())

    async def _try(
        self, address: tuple[str, int], live: Callable[[], tuple[str, ...]]
    ) -> tuple[ControllerConnection, Welcome] | None:
        """Connect to this address, or return None: the job has a controller elsewhere.

        A host that is gone does not answer at all: by the time at which an attempt to reach it has failed by itself,
        the controller that has come in its place may have given this host up. Raises OSError or ProtocolError.
        """
        connecting = asyncio.create_task(
            ControllerConnection.connect(
                *(address, self._token, self._session.hello(live())),
                tls=self._tls,
                server_name=self._server_name(address),
                keepalive=self._keepalive,
            )
        )
        moving = asyncio.create_task(self._await_another(address, MOVED_SECONDS))
        try:
            await asyncio.wait([connecting, moving], return_when=asyncio.FIRST_COMPLETED)
            return connecting.result() if connecting.done() else None
        finally:
            connecting.cancel()
            moving.cancel()

    async def _await_another(self, address: tuple[str, int], seconds: float) -> tuple[str, int]:
        """Return the address of the job's controller once it is not this one; it is looked up again and again."""
        while True:
            await asyncio.sleep(seconds)
            found = await asyncio.to_thread(self._find_controller)  # it may lie on storage that hangs
            if found != address:
                return found

    async def receive_all(self, take: Callable[[msgspec.Struct], None]) -> str:
        """Pass on each message until the connection ends; return why, or an empty string for an order to stop."""
        connection = self._connection
        assert connection is not None
        try:
            while (message := await connection.receive()) is not None:
                if isinstance(message, StopAgent):
                    return ""
                take(message)
                if self._session.receive(message):
                    self._confirm_soon()
        except ProtocolError as error:
            return str(error)
        return "it closed the connection"

    async def leave_for_another(self) -> None:
        """Drop the connection if another controller has taken over: this one may be frozen, and never close it."""
        connection = self._connection
        assert connection is not None
        address = await self._await_another(self._address, ADDRESS_SECONDS)
        self._say(f"the job has another controller, at {address[0]}:{address[1]}")
        connection.abort()

    def drop(self) -> None:
        """Forget the connection, which has ended."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def report(self, message: msgspec.Struct) -> None:
        """Send a message that must arrive: to this controller, or to the next one."""
        frame = self._session.report(message)
        if self._connection is not None:
            self._confirm()
            self._connection.send_frame(frame)

    def mention(self, message: msgspec.Struct, *, if_idle: bool = False) -> bool:
        """Send a message that matters now or never. False: not sent, since there is no connection.

        `if_idle`: nor is it sent over a connection on which much is waiting to be sent.
        """
        connection = self._connection
        if connection is None or (if_idle and connection.congested()):
            return False
        connection.send(message)
        return True

    async def close(self) -> None:
        """Close the connection once what was sent has left."""
        if self._connection is not None:
            await self._connection.close(FLUSH_SECONDS)

    def _confirm_soon(self) -> None:
        """Wait for a report that can carry the confirmation; a message of its own would cost more than the order."""
        if self._confirming is None:
            self._confirming = asyncio.get_running_loop().call_later(CONFIRM_SECONDS, self._confirm)

    def _confirm(self) -> None:
        if self._confirming is not None:
            self._confirming.cancel()
            self._confirming = None
        if self._connection is not None and (frame := self._session.confirmation()):
            self._connection.send_frame(frame)
