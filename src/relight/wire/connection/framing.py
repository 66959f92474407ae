"""Frames: four bytes of length (big endian), then one msgpack message of a known type.

The length is checked before anything is allocated, and a message that does not decode to one of the expected
types closes the connection (`ProtocolError`).
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from relight.errors import ProtocolError
from relight.wire.messages import MAX_FRAME_BYTES

LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct | msgspec.Raw, limit: int = MAX_FRAME_BYTES) -> bytes:
    """One frame, ready to send; a relayed (Raw) message as it came. Raises ProtocolError if it is over the limit."""
    payload = _encoder.encode(message)
    if len(payload) > limit:
        raise ProtocolError(f"{type(message).__name__} of {len(payload)} bytes is over {limit}")
    return LENGTH.pack(len(payload)) + payload


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


def split_payloads(buffer: bytearray, limit: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """Take every complete payload off the front of `buffer`, for callers that are handed bytes as they come."""
    while len(buffer) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(buffer)
        check_length(length, limit)
        end = LENGTH.size + length
        if len(buffer) < end:
            return
        payload = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        yield payload


def check_length(length: int, limit: int = MAX_FRAME_BYTES) -> None:
    """Raise ProtocolError if a frame is over the limit."""
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit}")
