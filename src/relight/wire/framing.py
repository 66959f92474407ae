"""Frames: four bytes of length (big endian), then one msgpack message of a known type.

The length is checked before anything is allocated, and a message that does not decode to one of the expected
types closes the connection (`ProtocolError`).
"""

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from relight.errors import ProtocolError
from relight.wire.messages import MAX_FRAME_BYTES

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct | msgspec.Raw, limit: int = MAX_FRAME_BYTES) -> bytes:
    """One frame, ready to send; a relayed (Raw) message as it came. Raises ProtocolError if it is over the limit."""
    payload = _encoder.encode(message)
    if len(payload) > limit:
        raise ProtocolError(f"{type(message).__name__} of {len(payload)} bytes is over {limit}")
    return _LENGTH.pack(len(payload)) + payload


def encode_payload(message: msgspec.Struct) -> msgspec.Raw:
    """A message encoded for relaying inside another (FromWorker, ToWorkers)."""
    return msgspec.Raw(_encoder.encode(message))


def make_decoder(types: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder that accepts only `types`, a union of message classes."""
    return msgspec.msgpack.Decoder(types)


def decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes | msgspec.Raw) -> Any:
    """Decode one payload, turning every malformation into ProtocolError."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


async def read_payload(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> bytes | None:
    """The next frame's payload, or None at the end of the stream. Strangers get a smaller `limit`."""
    try:
        header = await reader.readexactly(_LENGTH.size)
        (length,) = _LENGTH.unpack(header)
        _check_length(length, limit)
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError):  # such as a reset, or a host that has fallen silent
        return None


def split_payloads(buffer: bytearray, limit: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """Take every complete payload off the front of `buffer`, for callers that are handed bytes as they come."""
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        _check_length(length, limit)
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        payload = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        yield payload


def receive_payload(connection: socket.socket) -> bytes | None:
    """Blocking form of `read_payload`, for threads without an event loop."""
    header = _receive_exactly(connection, _LENGTH.size)
    if header is None:
        return None
    (length,) = _LENGTH.unpack(header)
    _check_length(length)
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


def _check_length(length: int, limit: int = MAX_FRAME_BYTES) -> None:
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit}")
