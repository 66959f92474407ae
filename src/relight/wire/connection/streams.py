"""Reads frames from sockets: with an event loop, and in threads without one."""

import asyncio
import socket

from relight.wire.connection.framing import LENGTH, check_length
from relight.wire.messages import MAX_FRAME_BYTES


async def read_payload(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> bytes | None:
    """The next frame's payload, or None at the end of the stream. Strangers get a smaller `limit`."""
    try:
        header = await reader.readexactly(LENGTH.size)
        (length,) = LENGTH.unpack(header)
        check_length(length, limit)
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):  # such as a reset, or a host that has fallen silent
        return None


def receive_payload(connection: socket.socket) -> bytes | None:
    """Blocking form of `read_payload`, for threads without an event loop."""
    header = _receive_exactly(connection, LENGTH.size)
    if header is None:
        return None
    (length,) = LENGTH.unpack(header)
    check_length(length)
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    buffer = bytearray(count)
    view = memoryview(buffer)
    done = 0
    while done < count:
        try:
            received = connection.recv_into(view[done:])
        except ConnectionError:
            return None
        if received == 0:
            return None
        done += received
    return bytes(buffer)
