"""Which sockets a gloo group opened, so that Stop can shut them down and every blocked rank returns at once.

gloo's own abort does nothing to a blocked rank (docs/decisions/0001-stopping-a-collective.md). Its sockets are
those that appeared while the group was formed. gloo closes one itself at its first error and the number may be
reused by anyone, so a socket is remembered with its inode and pinned by `dup` before it is touched.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


def open_sockets() -> dict[int, int]:
    """File descriptor to inode, of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


class GroupSockets:
    """The connected TCP sockets that appeared since this object was made."""

    def __init__(self) -> None:
        self._before = open_sockets()
        self._own: dict[int, int] | None = None

    def formed(self) -> None:
        """The group is complete: remember its sockets."""
        self._own = self._appeared()

    def shut_down(self) -> None:
        """Break every connection of the group; also of one that is still being formed."""
        for descriptor, inode in (self._own if self._own is not None else self._appeared()).items():
            with contextlib.suppress(OSError), _pinned(descriptor, inode) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def is_broken(self) -> bool:
        """Whether some peer's connection has ended: then a failed collective is not this rank's own doing."""
        for descriptor, inode in (self._own or {}).items():
            try:
                with _pinned(descriptor, inode) as connection:
                    if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                        return True
            except BlockingIOError:
                continue
            except OSError:
                return True
        return False

    def _appeared(self) -> dict[int, int]:
        mine = {}
        for descriptor, inode in open_sockets().items():
            if self._before.get(descriptor) == inode:
                continue
            with contextlib.suppress(OSError), _pinned(descriptor, inode) as connection:
                if _is_connected_tcp(connection):
                    mine[descriptor] = inode
        return mine


def _is_connected_tcp(connection: socket.socket) -> bool:
    """Listening sockets must be left alone: shutting one down ends the process inside gloo's accept loop."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    return not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@contextlib.contextmanager
def _pinned(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """The socket behind `descriptor` if it still is the remembered one; otherwise OSError."""
    copy = os.dup(descriptor)
    connection = socket.socket(fileno=copy)
    try:
        if os.fstat(copy).st_ino != inode:
            raise OSError("another file has taken this number")
        yield connection
    finally:
        connection.close()
