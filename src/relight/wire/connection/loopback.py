"""The address at which the processes of one host reach each other: 127.0.0.1, or ::1 where there is no IPv4."""

import os
import socket

IPV4, IPV6 = "127.0.0.1", "::1"
_VARIABLE = "RELIGHT_LOOPBACK"  # the launcher's choice, for the processes that it starts
_PATIENCE_SECONDS = 5.0


def find_loopback() -> str:
    """The first loopback address that carries a connection. Raises OSError if none does, as with `lo` down."""
    problem = OSError(0, "no loopback address")
    for address in (IPV4, IPV6):
        try:
            _try(address)
        except OSError as error:
            problem = error
            continue
        return address
    raise problem


def _try(address: str) -> None:
    """A listener alone proves nothing: an interface that is down keeps its addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname()[:2], _PATIENCE_SECONDS):
            pass


def is_default(address: str) -> bool:
    """Return whether a job whose controller listens there keeps to its host."""
    return address in (IPV4, IPV6)


def hand_down(address: str) -> None:
    """Tell the processes that this one starts."""
    os.environ[_VARIABLE] = address


def handed_down() -> str:
    """The launcher's choice; IPv4 if there was none."""
    return os.environ.get(_VARIABLE, "") or IPV4
