"""Settings of the job for a host that knows only the controller's address and the token."""

import asyncio
import os
import socket
import time

from relight.agent.connection.controller_connection import ControllerConnection
from relight.errors import ProtocolError
from relight.wire.connection.tls import Tls
from relight.wire.messages import PROTOCOL_VERSION, Hello
from relight.wire.settings import JobSettings, decode_settings

_RETRY_SECONDS = 0.2


async def fetch_settings(
    address: tuple[str, int], token: bytes, patience_seconds: float, tls: Tls | None = None
) -> JobSettings:
    """Ask the controller for the job's settings; it may not be there yet.

    Raises ProtocolError if it refuses, OSError if it cannot be reached for so long.
    """
    hello = Hello(protocol_version=PROTOCOL_VERSION, role="observer", name=f"joining-{os.getpid()}", mac=b"")
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            controller_connection, welcome = await ControllerConnection.connect(address, token, hello, tls=tls)
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(
                    f"no controller at {address[0]}:{address[1]} for {patience_seconds:g} s: {error}"
                ) from None
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        controller_connection.abort()
        try:
            return decode_settings(welcome.settings)
        except ValueError as error:
            raise ProtocolError(f"the controller's settings are not understood: {error}") from error


def address_towards(host: str, port: int) -> str:
    """The address of this host that `host` would see it under. Raises OSError if there is no way there."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(address)
        return str(probe.getsockname()[0])


def resolve(host: str) -> str:
    """The address that `host` stands for. Raises OSError if there is none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
