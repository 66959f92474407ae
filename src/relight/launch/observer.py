"""The launcher's connection to the controller: what the controller says of the job, and the request to end it."""

import asyncio
import os
from collections.abc import Callable

from relight.agent.connection.controller_connection import ControllerConnection
from relight.errors import ProtocolError
from relight.terminal import Screen
from relight.wire import messages as msg
from relight.wire.connection.framing import make_decoder
from relight.wire.connection.tls import Tls

REOBSERVE_SECONDS = 0.2


class Observer:
    """Stays connected, whichever controller the job has, and shows its updates."""

    def __init__(
        self,
        screen: Screen,
        read_token: Callable[[], bytes],
        name_of_server: Callable[[str], str],
        tls: Tls | None,
    ) -> None:
        """`name_of_server`: the name in the certificate of the controller at a host."""
        self._screen = screen
        self._read_token = read_token
        self._name_of_server = name_of_server
        self._tls = tls
        self._connection: ControllerConnection | None = None
        self._asked_to_end = ""
        self._last: ControllerConnection | None = None  # to a controller that has ended the job
        self._drain: msg.DrainHost | None = None  # what was asked for
        self._lost = ""  # why there was no connection the last time
        self._decode = make_decoder(msg.ObserverDown)
        self.ended: msg.JobEnded | None = None
        self.released: set[str] = set()  # hosts that were given back: they were drained
        self.faulty: set[str] = set()  # of these, the ones whose hardware has reported a fault
        self.winding_down = False  # a last step is being taken, or a checkpoint written
        self.silent_looks = 0  # since the last update; counted by ControllerChild

    async def follow(self, find: Callable[[], tuple[str, int]]) -> None:
        """Show what the controller at the address that `find` gives says, until it says that the job has ended."""
        while True:
            try:
                connection = await self._connect(*await asyncio.to_thread(find))
                try:
                    while (update := await connection.receive()) is not None:
                        self._take(update)
                        if self.ended is not None:
                            self._last = connection
                            return
                finally:
                    self._connection = None
                    if self._last is None:
                        connection.abort()
            except OSError:
                pass
            except ProtocolError as error:
                if str(error) != self._lost:  # once: it is tried again and again
                    self._lost = str(error)
                    self._screen.say(f"lost the controller's updates: {error}", "warning")
            await asyncio.sleep(REOBSERVE_SECONDS)

    async def hear_last_words(self) -> None:
        """Show notices that the controller has after the end of the job, until it closes the connection."""
        if self._last is None:
            return
        try:
            while (update := await self._last.receive()) is not None:
                if isinstance(update, msg.NoticeUpdate):
                    self._take(update)
        except (OSError, ProtocolError):
            return

    def ask_to_end(self, why: str) -> None:
        """Ask the controller to end the job; at the next connection if there is none."""
        self._asked_to_end = why
        if self._connection is not None:
            self._connection.send(msg.StopAgent(why=why))

    def ask_to_drain(self, order: msg.DrainHost) -> None:
        """Ask the controller to leave a host in order; at the next connection if there is none."""
        self._drain = order
        if self._connection is not None:
            self._connection.send(order)

    def abort(self) -> None:
        """Close the connection."""
        for connection in (self._connection, self._last):
            if connection is not None:
                connection.abort()

    async def _connect(self, host: str, port: int) -> ControllerConnection:
        hello = msg.Hello(
            protocol_version=msg.PROTOCOL_VERSION, role="observer", name=f"launcher-{os.getpid()}", mac=b""
        )
        connection, _ = await ControllerConnection.connect(
            (host, port),
            self._read_token(),
            hello,
            tls=self._tls,
            server_name=self._name_of_server(host),
            decoder=self._decode,
        )
        self._connection, self._lost = connection, ""
        if self._asked_to_end:
            self.ask_to_end(self._asked_to_end)
        elif self._drain is not None and self._drain.host not in self.released:
            self.ask_to_drain(self._drain)
        return connection

    def _take(self, update: msg.ObserverDown) -> None:
        self.silent_looks = 0
        match update:
            case msg.StatusUpdate():
                self.winding_down = update.winding_down
                self._screen.progress(update)
            case msg.NoticeUpdate():
                self._screen.say(update.text, update.level)
            case msg.DrainAnswer():
                if not update.refused:
                    self.released.add(update.host)
                    self.faulty |= {update.host} if update.faulty else set()
            case msg.JobEnded():
                self.ended = update
