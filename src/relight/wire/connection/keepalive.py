"""Keep-alive: the kernel soon ends a TCP connection whose peer's host has fallen silent, however busy both are."""

import errno
import socket
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Keepalive:
    """Limits of one kind of connection."""

    idle_seconds: int  # without traffic, before the kernel asks
    interval_seconds: int  # between two questions
    questions: int  # without an answer, then the connection is over
    unacknowledged_ms: int  # the same for data that was sent


LONGEST_SECONDS = 8.0  # of silence, on a control connection
SHORTEST_SECONDS = 0.5
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)

# A host that is lost must be noticed before its ranks' peers give up.
CONTROL = Keepalive(idle_seconds=3, interval_seconds=1, questions=4, unacknowledged_ms=int(1000 * LONGEST_SECONDS))
# Bulk data fills slow networks; its recoveries have deadlines of their own.
TRANSFER = Keepalive(idle_seconds=15, interval_seconds=5, questions=3, unacknowledged_ms=30_000)


def control_keepalive(reach_seconds: float) -> Keepalive:
    """Return the limits for a host that is given up when it was out of reach for so long.

    Half of that time is left for it to connect again.
    """
    seconds = min(LONGEST_SECONDS, max(SHORTEST_SECONDS, reach_seconds / 2))
    idle_seconds = min(CONTROL.idle_seconds, max(1, int(seconds)))
    return Keepalive(
        idle_seconds=idle_seconds,
        interval_seconds=CONTROL.interval_seconds,
        questions=CONTROL.questions,
        unacknowledged_ms=int(1000 * seconds),
    )


def silence_seconds(error: BaseException | None, keepalive: Keepalive) -> float:
    """Return for how long the peer's host had been silent at least when its connection ended with this error.

    0.0: it ended in another way than by silence.
    """
    is_silence = isinstance(error, OSError) and error.errno in _SILENCE
    return keepalive.unacknowledged_ms / 1000 if is_silence else 0.0


def end_when_silent(connection: socket.socket | None, keepalive: Keepalive) -> None:
    """Have the kernel end `connection` (if it is TCP) some time after its peer's host has fallen silent."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive.idle_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive.interval_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keepalive.questions)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, keepalive.unacknowledged_ms)
