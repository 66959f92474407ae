"""A TCP proxy between two hosts that does to what passes what bad networks do; each direction by itself."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any

UP, DOWN = "up", "down"  # from who connects, and back


@dataclass(frozen=True)
class Fault:
    """A fault in one direction."""

    latency_seconds: float = 0.0
    jitter_seconds: float = 0.0
    piece_bytes: int = 65536  # passed on at a time
    held: bool = False  # nothing passes, and the connection stays: it is passed on once this is over
    reset_at: int = -1  # byte of each connection at which both ends hear a reset
    close_at: int = -1  # byte after which this direction ends in order, while the other one goes on


NONE = Fault()


class Proxy:
    """Listens on loopback, on a thread of its own. `faults` may be changed at any time."""

    def __init__(self, target: tuple[str, int], seed: int = 0) -> None:
        self.faults = {UP: NONE, DOWN: NONE}
        self.connections = 0
        self.resets = 0
        self._target = target
        self._chance = random.Random(seed)
        self._changed: set[asyncio.Event] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def set(self, direction: str, fault: Fault) -> None:
        """From now on, also for what is held."""
        self.faults[direction] = fault
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        for event in self._changed:
            event.set()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _end(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, far_writer)
        try:
            await asyncio.gather(self._carry(UP, reader, far_writer, ends), self._carry(DOWN, far_reader, writer, ends))
        finally:
            for end in ends:
                end.transport.abort()

    async def _carry(
        self,
        direction: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        """Until either end is gone; an end in order is passed on as one."""
        carried = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                while data:
                    await self._released(direction)
                    fault = self.faults[direction]
                    piece, data = data[: fault.piece_bytes], data[fault.piece_bytes :]
                    delay = fault.latency_seconds + self._chance.uniform(0, fault.jitter_seconds)
                    if delay:
                        await asyncio.sleep(delay)
                    if 0 <= fault.reset_at < carried + len(piece):
                        self.resets += 1
                        writer.write(piece[: max(0, fault.reset_at - carried)])
                        _reset(ends)
                        return
                    if 0 <= fault.close_at < carried + len(piece):
                        writer.write(piece[: max(0, fault.close_at - carried)])
                        break
                    writer.write(piece)
                    await writer.drain()
                    carried += len(piece)
                else:
                    continue
                break
            writer.write_eof()

    async def _released(self, direction: str) -> None:
        event = asyncio.Event()
        self._changed.add(event)
        try:
            while self.faults[direction].held:
                event.clear()
                await event.wait()
        finally:
            self._changed.discard(event)


def _reset(ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
    for end in ends:
        connection = end.get_extra_info("socket")
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.transport.abort()
