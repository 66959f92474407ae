"""A TCP peer whose host or network is gone is noticed by the kernel, however busy or starved both processes are."""

import socket

IDLE_SECONDS = 3  # without a word, before the kernel asks
ASK_SECONDS = 1  # between two questions
UNANSWERED = 4  # questions, then the connection is over
UNACKNOWLEDGED_MS = 8000  # the same for what was sent


def notice_silence(connection: socket.socket | None) -> None:
    """End `connection` (a TCP socket) by itself some seconds after its peer's host fell silent."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, UNANSWERED)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
