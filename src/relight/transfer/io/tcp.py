"""TCP between workers of a job on different hosts: typed messages, and raw bytes between them, for threads.

Before anything else both sides prove that they know the job's token, without sending it (wire/connection/handshake.py).
A stranger gets a few bytes, a few seconds, and at most one message of MAX_PROOF_BYTES read. After that, sizes are
checked before anything is allocated, as everywhere. Without TLS, what is sent is neither encrypted nor signed piece by
piece, as with gloo and NCCL: the proof keeps out a peer that can reach the port, not one that can change packets on the
way.
"""

import contextlib
import errno
import ipaddress
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from relight.errors import ProtocolError, TransferError
from relight.transfer.io.tls import TlsSocket
from relight.wire.connection.framing import decode, encode_frame, make_decoder
from relight.wire.connection.handshake import ConnectingSide, ListeningSide
from relight.wire.connection.keepalive import TRANSFER, end_when_silent
from relight.wire.connection.tls import NO_TLS_HERE, NO_TLS_THERE, Tls, explain
from relight.wire.messages import PROTOCOL_VERSION, Challenge, Hello, Refused, StartTls, Welcome

HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 32  # connections that have not proved themselves yet
MAX_PROOF_BYTES = 1024
MAX_MESSAGE_BYTES = 64 * 2**20  # a description of a hundred thousand tensors
_DISCARD_BYTES = 2**18  # at a time
_LENGTH = struct.Struct(">I")
_BACKLOG = 64
_SHORT_OF_RESOURCES_SECONDS = 0.1
_first = make_decoder(StartTls | Challenge)
_challenge = make_decoder(Challenge)
_hello = make_decoder(Hello)
_verdict = make_decoder(Welcome | Refused)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Split 10.0.0.7:7001 or [fd00::7]:7001. Raises TransferError: names are not looked up here."""
    host, _, port = endpoint.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise ValueError
    except ValueError:
        raise TransferError(f"{endpoint[:100]!r} is no endpoint: an address and a port, as in 10.0.0.7:7001") from None
    return str(address), int(port)


def listen_on(host: str, port: int = 0) -> tuple[socket.socket, str]:
    """A listening socket at this address of this machine, and its endpoint. Raises TransferError."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise TransferError(f"{host[:100]!r} is no IP address; use one of this host's, such as 10.0.0.7") from None
    if address.is_unspecified:
        raise TransferError(f"{host} is not an address that other hosts can reach this one at; use one that is")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.settimeout(None)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(address), port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise TransferError(f"cannot listen at {host}, port {port or 'any'}: {error.strerror}") from error
    shown = f"[{address}]" if address.version == 6 else str(address)
    return listener, f"{shown}:{listener.getsockname()[1]}"


def begin_connecting(endpoint: str) -> socket.socket:
    """A socket on its way to `endpoint`; `TcpChannel.establish` waits for it. Raises OSError or TransferError."""
    host, port = parse_endpoint(endpoint)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    status = connection.connect_ex((host, port))
    if status not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(status, errno.errorcode.get(status, "cannot connect"))
    return connection


class TcpChannel:
    """One connection. Any thread may `send` and `break_off`; bytes go, and everything comes, on one thread each."""

    def __init__(
        self, connection: socket.socket, token: bytes, types: Any, *, tls: Tls | None = None, server_name: str = ""
    ) -> None:
        """`types`: what the other side may say, once it is known to be of this job. Raises ProtocolError: no token.

        `tls`: the other side must have a certificate too; of `server_name`, if it is the one that listens.
        """
        if not token:
            raise ProtocolError("there is no job token to prove anything with")
        self._socket: socket.socket | TlsSocket = connection
        self._plain = connection
        self._tls = tls
        self._server_name = server_name
        self._token = token
        self._decoder = make_decoder(types)
        self._sending = threading.Lock()
        with contextlib.suppress(OSError):  # it has ended already: the first read says so
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_when_silent(connection, TRANSFER)

    # --- TLS ----------------------------------------------------------------------------------------------------
    def _wrap(self, context: ssl.SSLContext, ends: float, server_name: str | None) -> None:
        """Go on in TLS; None as a name: as the listening side. Raises ProtocolError."""
        try:
            self._plain.settimeout(max(0.001, ends - time.monotonic()))
            wrapped = context.wrap_socket(
                self._plain,
                server_side=server_name is None,
                server_hostname=server_name,
                do_handshake_on_connect=False,
            )
            self._plain = wrapped  # the former one is empty now
            wrapped.do_handshake()
        except OSError as error:
            raise ProtocolError(explain(error, "the peer's" if server_name is None else "its")) from error
        self._socket = TlsSocket(wrapped)

    # --- the handshake ------------------------------------------------------------------------------------------
    def admit(self, role: str, peer_role: str) -> None:
        """The listening side's part. Raises ProtocolError or OSError (TimeoutError is one) if it is a stranger."""
        ends = time.monotonic() + HANDSHAKE_SECONDS
        handshake = ListeningSide(self._token)
        if self._tls is not None:
            self._send_within(StartTls(protocol_version=PROTOCOL_VERSION), ends)
            self._wrap(self._tls.server(), ends, None)
        self._send_within(handshake.challenge(), ends)
        hello: Hello = self._receive_within(_hello, ends)
        try:
            handshake.check(hello, (peer_role,))
        except ProtocolError as error:
            self._send_within(Refused(reason=str(error)), ends)
            raise
        self._send_within(Welcome(mac=handshake.proof(hello, role)), ends)
        self.set_timeout(None)

    def introduce(self, role: str, peer_role: str) -> None:
        """The connecting side's part, from before it is connected. Raises ProtocolError or OSError."""
        ends = time.monotonic() + HANDSHAKE_SECONDS
        self._await_connected(ends)
        challenge = self._receive_challenge(ends)
        handshake = ConnectingSide(self._token)
        self._send_within(handshake.answer(challenge, Hello(protocol_version=PROTOCOL_VERSION, role=role)), ends)
        verdict = self._receive_within(_verdict, ends)
        if isinstance(verdict, Refused):
            raise ProtocolError(f"it refuses: {verdict.reason[:500]}")
        handshake.check(verdict.mac, peer_role)
        self.set_timeout(None)

    def _receive_challenge(self, ends: float) -> Challenge:
        first = self._receive_within(_first, ends)
        if isinstance(first, Challenge) and self._tls is not None:
            raise ProtocolError(NO_TLS_THERE)
        if isinstance(first, Challenge):
            return first
        if self._tls is None:
            raise ProtocolError(NO_TLS_HERE)
        self._wrap(self._tls.client(), ends, self._server_name)
        try:
            challenge: Challenge = self._receive_within(_challenge, ends)
        except ssl.SSLError as error:
            raise ProtocolError(explain(error, "its")) from error
        return challenge

    def _await_connected(self, ends: float) -> None:
        poll = select.poll()
        poll.register(self._plain, select.POLLOUT)
        if not poll.poll(max(0.0, ends - time.monotonic()) * 1000):
            raise TimeoutError("no answer")
        status = self._plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, errno.errorcode.get(status, ""))

    def _send_within(self, message: msgspec.Struct, ends: float) -> None:
        self._socket.settimeout(max(0.001, ends - time.monotonic()))
        self._socket.sendall(encode_frame(message))

    def _receive_within(self, decoder: msgspec.msgpack.Decoder[Any], ends: float) -> Any:
        """A stranger's message: small, and complete by then, however slowly it drips."""
        header = self._read_within(_LENGTH.size, ends)
        (length,) = _LENGTH.unpack(header)
        if length > MAX_PROOF_BYTES:
            raise ProtocolError(f"a stranger's message of {length} bytes")
        return decode(decoder, self._read_within(length, ends))

    def _read_within(self, count: int, ends: float) -> bytes:
        data = b""
        while len(data) < count:
            left = ends - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no proof within {HANDSHAKE_SECONDS:g} s")
            self._socket.settimeout(left)
            more = self._socket.recv(count - len(data))
            if not more:
                raise ProtocolError("the connection ended in the handshake")
            data += more
        return data

    # --- messages and bytes -------------------------------------------------------------------------------------
    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError if the other side is gone, or does not take anything for long."""
        frame = encode_frame(message, MAX_MESSAGE_BYTES)
        with self._sending:
            self.send_bytes([memoryview(frame)])

    def send_bytes(self, views: Sequence[memoryview]) -> None:
        """Send these (at most some hundred), one after the other, straight from where they lie. Raises OSError."""
        while views:
            views = _without(views, self._socket.sendmsg(views))

    def receive(self) -> Any:
        """The next message, or None at the end of the stream. Raises ProtocolError on nonsense, OSError."""
        header = bytearray(_LENGTH.size)
        if not self.receive_bytes([memoryview(header)]):
            return None
        (length,) = _LENGTH.unpack(header)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        payload = bytearray(length)
        if not self.receive_bytes([memoryview(payload)]):
            return None
        return decode(self._decoder, bytes(payload))

    def receive_bytes(self, views: Sequence[memoryview]) -> bool:
        """Fill these (at most some hundred), straight where they lie. False: the stream ended first. Raises OSError."""
        while views:
            received = self._socket.recvmsg_into(views)[0]
            if not received:
                return False
            views = _without(views, received)
        return True

    def is_readable(self, within_seconds: float) -> bool:
        """Wait until there is something to receive, or the end of the stream. False: not within the time."""
        if isinstance(self._socket, TlsSocket) and self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(within_seconds * 1000))

    def set_timeout(self, seconds: float | None) -> None:
        """Limit each wait for the other side; some bytes are enough."""
        self._socket.settimeout(seconds)

    def break_off(self) -> None:
        """Make whatever waits in another thread return."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._plain, socket.SHUT_RDWR)

    def close(self) -> None:
        self._plain.close()


def _without(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """`views` without their first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]] if count else views[number:]
        count -= len(view)
    return []


def discard(channel: TcpChannel, count: int) -> None:
    """Receive and discard `count` bytes. Raises OSError."""
    scratch = memoryview(bytearray(min(count, _DISCARD_BYTES)))
    while count:
        part = scratch[: min(count, len(scratch))]
        if not channel.receive_bytes([part]):
            raise ConnectionResetError("the connection ended in the middle of a bucket")
        count -= len(part)


def accept_forever(listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
    """Give each connection to a thread of its own, on a thread of its own, until the listener is closed."""

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # no descriptor left, or the peer has gone already: others must not suffer for it
                if listener.fileno() < 0:
                    return
                time.sleep(_SHORT_OF_RESOURCES_SECONDS)
                continue
            threading.Thread(target=serve, args=(connection,), name=name, daemon=True).start()

    threading.Thread(target=accept, name=f"{name}-accept", daemon=True).start()


class Strangers:
    """Connections that have not proved themselves yet, counted: no more than MAX_STRANGERS at a time."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_STRANGERS)

    def admit(self, channel: TcpChannel, role: str, peer_role: str) -> None:
        """Run the handshake. Raises ProtocolError or OSError; the caller closes the connection."""
        if not self._places.acquire(blocking=False):
            raise ProtocolError(f"more than {MAX_STRANGERS} connections wait to be known")
        try:
            channel.admit(role, peer_role)
        finally:
            self._places.release()
