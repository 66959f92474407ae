"""Serves connections of observers: `relight run`, and hosts that join."""

from relight.core.protocol.events import HostDraining
from relight.server.job.driver import Driver
from relight.server.job.job_end import JobEnd
from relight.server.network.admission import Admission, Peer
from relight.server.network.connection import Connection
from relight.server.network.observers import Observers
from relight.server.sessions.shutdown import Shutdown
from relight.wire.connection.framing import decode, make_decoder
from relight.wire.connection.streams import read_payload
from relight.wire.messages import DrainHost, ObserverUp, StopAgent


class ObserverSessions:
    """One session for each connection of an observer."""

    def __init__(
        self, admission: Admission, observers: Observers, shutdown: Shutdown, driver: Driver, end: JobEnd
    ) -> None:
        self._admission = admission
        self._observers = observers
        self._shutdown = shutdown
        self._driver = driver
        self._end = end
        self._decode = make_decoder(ObserverUp)

    async def serve(self, connection: Connection, peer: Peer) -> None:
        """Serve one connection. Raises ProtocolError."""
        self._admission.welcome(connection, peer)
        self._observers.add(connection, peer.hello.name)
        try:
            self._end.tell_observer(connection)
            while (payload := await read_payload(connection.reader)) is not None:
                message = decode(self._decode, payload)
                if isinstance(message, StopAgent):
                    self._shutdown.request(message.why)
                elif isinstance(message, DrainHost) and self._end.command is None:
                    event = HostDraining(agent=message.host, reason=message.why, leaves=message.leaves)
                    self._driver.feed(event)
        finally:
            self._observers.discard(connection)
