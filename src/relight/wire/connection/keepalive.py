"""Keep-alive: the kernel soon ends a TCP connection whose peer's host has fallen silent, however busy both are."""

import socket
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Keepalive:
    """Limits of one kind of connection."""

    idle_seconds: int  # without traffic, before the kernel asks
    interval_seconds: int  # between two questions
    questions: int  # without an answer, then the connection is over
    unacknowledged_ms: int  # the same for data that was sent


# A host that is lost must be noticed before its ranks' peers give up.
CONTROL = Keepalive(idle_seconds=3, interval_seconds=1, questions=4, unacknowledged_ms=8_000)
# Bulk data fills slow networks; its recoveries have deadlines of their own.
TRANSFER = Keepalive(idle_seconds=15, interval_seconds=5, questions=3, unacknowledged_ms=30_000)


def end_when_silent(connection: socket.socket | None, keepalive: Keepalive) -> None:
    """Have the kernel end `connection` (if it is TCP) some time after its peer's host has fallen silent."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive.idle_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive.interval_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keepalive.questions)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, keepalive.unacknowledged_ms)
