"""A Unix socket that carries typed messages and descriptors, for threads without an event loop.

Only processes of the same user get through: the socket's mode says so, and each side asks the kernel who the other
is.
"""

import array
import contextlib
import fcntl
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relight.errors import PlaceTakenError, ProtocolError, TransferError
from relight.wire.connection.framing import decode, encode_frame, split_payloads

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MAX_DESCRIPTORS = 8
_RECEIVE_BYTES = 2**15  # a larger one would be mapped and unmapped for each message
MAX_MESSAGE_BYTES = 64 * 2**20  # a description of a hundred thousand tensors
SOCKET_NAME = "weights.sock"


def socket_path(place: str | Path) -> Path:
    """Return the path of the socket: `place` itself, or weights.sock in the directory `place`."""
    path = Path(place)
    return path / SOCKET_NAME if path.is_dir() else path


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """A socket's name may have 107 bytes; through its directory's descriptor any path is short."""
    try:
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"there is no directory {path.parent}: {error.strerror}") from error
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, in place of one that a dead process left. Raises TransferError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with _alone_in(path.parent), _short_name(path) as name:
            if path.is_socket():
                if _answers(name):
                    raise PlaceTakenError(f"another publisher is alive at {path}; stop it, or choose another place")
                path.unlink(missing_ok=True)
            listener.bind(name)
            os.chmod(path, 0o600)
            listener.listen(64)
    except (OSError, TransferError) as error:
        listener.close()
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"cannot listen at {path}: {error.strerror or error}") from error
    return listener


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """One process at a time: of two that find a dead one's socket, the second must not remove the first one's."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(f"there is no directory {directory}: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _answers(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # alive, and too busy to take one more
            return True
        return True


def connect(path: Path) -> socket.socket:
    """Connect to a publisher. Raises OSError if there is no listener (yet)."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short_name(path) as name:
            connection.connect(name)
        _check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_peer(connection: socket.socket) -> int:
    """The peer's pid. Raises ProtocolError if it runs as another user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in (os.getuid(), 0):
        raise ProtocolError(f"process {pid} runs as user {uid}")
    return int(pid)


def _rights(descriptors: Sequence[int]) -> list[tuple[int, int, bytes]]:
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]


class Channel:
    """One connection. `send` may be called from any thread, `receive` from one.

    An event loop uses `post` and `flush` instead of `send`, after `set_timeout(0)`.
    """

    def __init__(self, connection: socket.socket, types: Any) -> None:
        """`types`: what the other side may say."""
        self.peer_pid = _check_peer(connection)
        connection.settimeout(None)  # whatever the script's default is (socket.setdefaulttimeout)
        self._socket = connection
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(types)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._messages: deque[Any] = deque()
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self.descriptors: list[int] = []  # received and not yet taken

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError if the other side is gone, or does not take anything for long."""
        frame = encode_frame(message, MAX_MESSAGE_BYTES)
        with self._sending:
            if descriptors:
                sent = self._socket.sendmsg([frame], _rights(descriptors))
                frame = frame[sent:]
            if frame:
                self._socket.sendall(frame)

    def post(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Like `send`, but never waits: what the socket does not take now is left to `flush`."""
        self._unsent.append((encode_frame(message, MAX_MESSAGE_BYTES), descriptors))
        self.flush()

    def flush(self) -> None:
        """Send what was posted, as far as the socket takes it. Raises OSError if the other side is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                frame, descriptors = self._unsent[0]
                sent = self._socket.sendmsg([frame], _rights(descriptors))
                if sent == len(frame):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = (frame[sent:], ())

    @property
    def has_unsent(self) -> bool:
        """True if something that was posted waits for the other side to read."""
        return bool(self._unsent)

    def set_timeout(self, seconds: float | None) -> None:
        """Limit each send and receive."""
        self._socket.settimeout(seconds)

    def receive(self) -> Any:
        """The next message, or None at the end of the stream. Raises ProtocolError on nonsense, OSError."""
        while not self._messages:
            if not self.pull():
                return None
        return self._messages.popleft()

    def pull(self) -> bool:
        """Read what is there (waits if nothing is, unless it was found readable); False at the end of the stream."""
        data, ancillary, flags, _ = self._socket.recvmsg(
            _RECEIVE_BYTES, socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                self.descriptors += found
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("more descriptors than a message may carry")
        if not data:
            return False
        self._buffer += data
        self._messages += [
            decode(self._decoder, payload) for payload in split_payloads(self._buffer, MAX_MESSAGE_BYTES)
        ]
        return True

    def pulled(self) -> list[Any]:
        """The messages that are complete."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def has_ended(self) -> bool:
        """Return whether the other side has closed, even if its last words are still to be read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def break_off(self) -> None:
        """Make a `receive` that waits in another thread return."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
