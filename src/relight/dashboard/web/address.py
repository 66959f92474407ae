"""The page's address, as people write it and as they open it."""

import socket
from urllib.parse import quote

from relight.wire.connection.address import bracketed
from relight.wire.connection.loopback import IPV4, find_loopback

DEFAULT_PORT = 7117


def split_address(address: str) -> tuple[str, int | None]:
    """Host and port of "HOST:PORT", "HOST", ":PORT" or "PORT"; the port is None if it is not given.

    Raises ValueError.
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        host, port = ("", address) if address.isdigit() else (address, "")
    elif address.endswith("]"):  # an IPv6 address without a port
        host, port = address, ""
    host = host.removeprefix("[").removesuffix("]") or _loopback()
    if not port:
        return host, None
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError(f"dashboard address {address!r}: expected HOST:PORT, such as {IPV4}:{DEFAULT_PORT}")
    return host, int(port)


def _loopback() -> str:
    try:
        return find_loopback()
    except OSError:
        return IPV4  # listening there says what is wrong


def page_url(host: str, port: int, token: str) -> str:
    """Return the address to open. The token is after the #, which browsers do not send: it gets into no log."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = bracketed(host)
    return f"http://{shown}:{port}/" + (f"#token={quote(token, safe='')}" if token else "")
