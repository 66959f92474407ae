"""The controller's port."""

import asyncio
from collections.abc import Awaitable, Callable

from relight.server.network.admission import MAX_STRANGERS
from relight.server.network.connection import Connection
from relight.wire.connection.keepalive import CONTROL, Keepalive, control_keepalive
from relight.wire.settings import JobSettings


class Listener:
    """Holds the port from `open` on, and accepts connections from `start` on."""

    def __init__(self) -> None:
        self._server: asyncio.Server
        self._serve: Callable[[Connection], Awaitable[None]]
        self._serving: set[asyncio.Task[None]] = set()
        self._keepalive: Keepalive = CONTROL

    @classmethod
    async def open(cls, settings: JobSettings, port: int = 0) -> "Listener":
        """Take the port of the settings, or else `port` if that is free, or else any.

        Raises OSError if the port of the settings is taken.
        """
        listener = cls()
        listener._keepalive = control_keepalive(settings.agent_timeout_seconds)
        try:
            listener._server = await listener._bind(settings.controller_address, settings.controller_port or port)
        except OSError:
            if settings.controller_port:
                raise
            listener._server = await listener._bind(settings.controller_address, 0)
        return listener

    @property
    def address(self) -> tuple[str, int]:
        """Host and port for peers."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self, serve: Callable[[Connection], Awaitable[None]]) -> None:
        """Accept connections, each served by `serve` in a task of its own."""
        self._serve = serve
        await self._server.start_serving()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()

    async def end_connections(self) -> None:
        """Cancel what still serves a connection."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _bind(self, address: str, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._accept, address, port, backlog=MAX_STRANGERS, start_serving=False)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._run(Connection(reader, writer, self._keepalive)))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _run(self, connection: Connection) -> None:
        await self._serve(connection)
