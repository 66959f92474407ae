"""Frames through sockets: with an event loop, and read in threads without one."""

import asyncio
import contextlib
import socket

import msgspec

from relight.wire.connection.framing import LENGTH, check_length, encode_frame
from relight.wire.messages import MAX_FRAME_BYTES

MAX_UNSENT_BYTES = 64 * 2**20  # a peer that does not read this much is cut off


class FrameStream:
    """Sends frames without waiting. A peer that has stopped reading loses its connection, not our memory."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, message: msgspec.Struct) -> None:
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        if self.writer.is_closing():
            return
        self.writer.write(frame)
        if self.unsent_bytes() > MAX_UNSENT_BYTES:
            self.abort()

    def unsent_bytes(self) -> int:
        return self.writer.transport.get_write_buffer_size()

    async def close(self, timeout_seconds: float) -> None:
        """Close once what was sent has left, or after `timeout_seconds`."""
        self.writer.close()
        with contextlib.suppress(OSError):  # TimeoutError is one
            await asyncio.wait_for(self.writer.wait_closed(), timeout_seconds)
        self.abort()

    def abort(self) -> None:
        self.writer.transport.abort()


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
