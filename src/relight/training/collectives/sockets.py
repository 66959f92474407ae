"""The sockets of a gloo group: Stop cuts them, and blocked ranks return at once.

gloo's own abort does nothing to a blocked rank (docs/decisions/0001-stopping-a-collective.md). A group watches all
its sockets with one epoll instance of its own, one listener and a connection to every peer, so what other threads
open meanwhile is never taken for the group's; and at the time of the cut the kernel says which are left. gloo closes
a failed peer's socket itself and its number may be reused at once, so each is pinned by `dup` and compared by inode.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

Entry = tuple[int, int]  # descriptor and inode


class GroupSockets:
    """Make one before the group is formed, and call `formed` after."""

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._before = {inode for _, inode in _all_sockets()}
        self._epoll = -1

    def formed(self) -> None:
        """Find the group's epoll instance. Raises RuntimeError if none fits: then nothing could stop the group."""
        if self._peers == 0:
            return
        fitting = [epoll for epoll in _epoll_descriptors() if self._fits(epoll)]
        if len(fitting) != 1:
            raise RuntimeError(f"{len(fitting)} epoll instances look like the new gloo group's; cannot stop it")
        self._epoll = fitting[0]

    def cut(self) -> None:
        """End every connection for reading. Not for writing: gloo loses a send that meets a closed writing side."""
        for entry in _watched(self._epoll):
            with contextlib.suppress(OSError), _pinned(entry) as connection:
                if _is_connected(connection):
                    connection.shutdown(socket.SHUT_RD)

    def is_broken(self) -> bool:
        """Return whether some peer's connection has ended: then a failed collective is not this rank's own doing."""
        sound = 0
        for entry in _watched(self._epoll):
            with contextlib.suppress(OSError), _pinned(entry) as connection:
                sound += _is_connected(connection) and _is_open(connection)
        return sound < self._peers

    def _fits(self, epoll: int) -> bool:
        listening = connected = 0
        for entry in _watched(epoll):
            if entry[1] not in self._before:
                with contextlib.suppress(OSError), _pinned(entry) as connection:
                    connected += _is_connected(connection)
                    listening += not _is_connected(connection)
        return (listening, connected) == (1, self._peers)


def _all_sockets() -> list[Entry]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                found.append((int(name), status.st_ino))
    return found


def _epoll_descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.append(int(name))
    return found


def _watched(epoll: int) -> list[Entry]:
    """Return the files that an epoll instance watches, from the kernel; none if it is closed."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines():
            if line.startswith("tfd:"):
                words = line.replace(":", ": ").split()
                found.append((int(words[1]), int(words[words.index("ino:") + 1], 16)))
    return found


@contextlib.contextmanager
def _pinned(entry: Entry) -> Iterator[socket.socket]:
    """Hold the TCP socket of a descriptor open meanwhile. Raises OSError if the number has another file by now."""
    copy = os.dup(entry[0])
    status = os.fstat(copy)
    if status.st_ino != entry[1] or not stat.S_ISSOCK(status.st_mode):
        os.close(copy)
        raise OSError("another file has taken this number")
    with socket.socket(fileno=copy) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            raise OSError("not a TCP socket")
        yield connection


def _is_connected(connection: socket.socket) -> bool:
    """Listening sockets must be left alone: cutting one ends the process inside gloo's accept loop."""
    return not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
