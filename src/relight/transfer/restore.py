"""Copy the state of a healthy replica to a replacement, over Unix sockets, each piece verified on arrival.

    target -> source   Request(generation, version, part, parts)
    source -> target   Header(tree, paths, specs, ...), then for each piece of the part: digest (8 bytes), bytes

The target receives straight into its own tensors: it is blank, so nothing good is ever overwritten, and nobody
sees the state before the last digest has matched. A source whose process dies ends the stream, which the target
reports at once. Shapes come from the target's own tensors wherever it has them; sizes are bounded by the header,
which is bounded itself.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from relight.errors import RestoreError
from relight.transfer.codec import Flat, TensorSpec, empty_like, host_copy, piece_digest, pieces, raw_bytes, spec_of

_LENGTH = struct.Struct(">I")
_DIGEST = struct.Struct(">Q")
_MAX_HEADER_BYTES = 64 * 2**20
_SOCKET_BUFFER_BYTES = 2**20


class Request(msgspec.Struct, frozen=True):
    """What a target asks a source for."""

    generation: int
    version: int
    part: int
    parts: int


class Header(msgspec.Struct, frozen=True):
    """What comes before the bytes."""

    generation: int
    version: int
    meta: dict[str, Any]
    tree: Any
    paths: list[str]
    specs: list[TensorSpec]
    error: str = ""


class Offer:
    """The state that a source serves during one generation."""

    def __init__(self, generation: int, version: int, meta: dict[str, Any], flat: Flat) -> None:
        self.header = Header(generation, version, meta, flat.tree, flat.paths, flat.specs)
        self.tensors = flat.tensors
        # Piece digests by tensor. Sending fills them from the front, the source's own state digest from the back.
        self.digests: dict[int, list[int]] = {}


def part_of(sizes: Sequence[int], part: int, parts: int) -> range:
    """Indices of the tensors in `part` of `parts`: contiguous, balanced by bytes, each index in exactly one part."""
    total = sum(sizes)
    bounds = [0]
    done = 0
    for index, size in enumerate(sizes):
        done += size
        while len(bounds) < parts and done * parts >= total * len(bounds):
            bounds.append(index + 1)
    bounds += [len(sizes)] * (parts + 1 - len(bounds))
    bounds[parts] = len(sizes)
    return range(bounds[part], bounds[part + 1])


class RestoreServer:
    """Serves offers to whoever connects. One thread per connection; `withdraw` breaks them all."""

    def __init__(self, path: Path, halfway: Callable[[], None]) -> None:
        self.address = str(path)
        self._halfway = halfway
        self._condition = threading.Condition()
        self._offer: Offer | None = None
        self._newest = 0
        self._connections: set[socket.socket] = set()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(self.address)
        os.chmod(self.address, 0o600)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="relight-restore", daemon=True).start()

    def offer(self, offer: Offer) -> None:
        """Serve this state from now on."""
        with self._condition:
            self._offer = offer
            self._condition.notify_all()

    def withdraw(self, generation: int) -> None:
        """Serve nothing older than `generation`; transfers under way are broken off."""
        with self._condition:
            self._newest = max(self._newest, generation)
            if self._offer is not None and self._offer.header.generation < self._newest:
                self._offer = None
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._condition.notify_all()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="relight-source", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError, RestoreError), connection:
            with self._condition:
                self._connections.add(connection)
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
                request = msgspec.msgpack.decode(_receive_block(connection, 4096), type=Request)
                offer = self._await_offer(request)
                if offer is None:
                    empty = Header(request.generation, request.version, {}, None, [], [], error="generation is closed")
                    _send_block(connection, msgspec.msgpack.encode(empty))
                    return
                _send_block(connection, msgspec.msgpack.encode(offer.header))
                self._send_part(connection, offer, request)
            finally:
                with self._condition:
                    self._connections.discard(connection)

    def _await_offer(self, request: Request) -> Offer | None:
        def settled() -> bool:
            return self._newest > request.generation or self._matching(request) is not None

        with self._condition:
            self._condition.wait_for(settled, 600)
            return self._matching(request)

    def _matching(self, request: Request) -> Offer | None:
        offer = self._offer
        if offer is None:
            return None
        return (
            offer if (offer.header.generation, offer.header.version) == (request.generation, request.version) else None
        )

    def _send_part(self, connection: socket.socket, offer: Offer, request: Request) -> None:
        sizes = [t.numel() * t.element_size() for t in offer.tensors]
        indices = part_of(sizes, request.part, request.parts)
        half, sent = sum(sizes[i] for i in indices) // 2, 0
        for index in indices:
            host = host_copy(offer.tensors[index])
            view = raw_bytes(host)
            known = offer.digests.get(index)
            digests = []
            for number, (start, end) in enumerate(pieces(len(view))):
                digests.append(known[number] if known else piece_digest(view[start:end]))
                connection.sendall(_DIGEST.pack(digests[-1]))
                connection.sendall(view[start:end])
                if sent < half <= sent + end - start:
                    self._halfway()
                sent += end - start
            offer.digests[index] = digests


class Restored(msgspec.Struct, frozen=True):
    """A complete, verified copy: the header, one tensor per path, and the piece digests."""

    header: Header
    tensors: list[torch.Tensor]
    digests: list[list[int]]
    received_bytes: int


class RestoreClient:
    """Fetches a version from one or several sources. `cancel` breaks it off from another thread."""

    def __init__(self, halfway: Callable[[], None], timeout_seconds: float) -> None:
        self._halfway = halfway
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._cancelled = False

    def cancel(self) -> None:
        """Make `fetch` raise RestoreError soon."""
        with self._lock:
            self._cancelled = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def fetch(
        self, generation: int, version: int, addresses: Sequence[str], destination: Callable[[str], torch.Tensor | None]
    ) -> Restored:
        """Copy `version` from `addresses`, a stripe from each.

        `destination(path)` gives the tensor to receive into, if the target has one; otherwise one is made.
        Raises RestoreError on a broken stream, a digest that does not match, or sources that disagree.
        """
        parts = len(addresses)
        connections = [self._ask(address, generation, version, i, parts) for i, address in enumerate(addresses)]
        headers = [self._header(connection, generation, version) for connection in connections]
        first = headers[0]
        if any((h.paths, h.specs) != (first.paths, first.specs) for h in headers[1:]):
            raise RestoreError("two sources describe the same version differently")
        tensors = [_destination(destination(p), spec) for p, spec in zip(first.paths, first.specs, strict=True)]
        sizes = [t.numel() * t.element_size() for t in tensors]
        digests: list[list[int]] = [[] for _ in tensors]
        errors: list[BaseException] = []

        def receive(part: int) -> None:
            try:
                self._receive_part(connections[part], part_of(sizes, part, parts), tensors, digests)
            except BaseException as error:
                errors.append(error)

        others = [threading.Thread(target=receive, args=(part,)) for part in range(1, parts)]
        for thread in others:
            thread.start()
        receive(0)
        for thread in others:
            thread.join()
        for connection in connections:
            connection.close()
        if errors:
            raise RestoreError(f"restoring version {version}: {errors[0]}") from errors[0]
        return Restored(first, tensors, digests, sum(sizes))

    def _ask(self, address: str, generation: int, version: int, part: int, parts: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with self._lock:
            if self._cancelled:
                raise RestoreError("cancelled")
            self._connections.append(connection)
        connection.settimeout(self._timeout_seconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        try:
            connection.connect(address)
            _send_block(connection, msgspec.msgpack.encode(Request(generation, version, part, parts)))
        except OSError as error:
            raise RestoreError(f"the source at {Path(address).name} cannot be reached: {error}") from error
        return connection

    def _header(self, connection: socket.socket, generation: int, version: int) -> Header:
        try:
            header = msgspec.msgpack.decode(_receive_block(connection, _MAX_HEADER_BYTES), type=Header)
        except (OSError, msgspec.DecodeError) as error:
            raise RestoreError(f"the source ended before it described its state: {error}") from error
        if header.error or (header.generation, header.version) != (generation, version):
            raise RestoreError(header.error or f"the source offers version {header.version}, not {version}")
        return header

    def _receive_part(
        self, connection: socket.socket, indices: range, tensors: list[torch.Tensor], digests: list[list[int]]
    ) -> None:
        head = bytearray(_DIGEST.size)
        half, got = sum(tensors[i].numel() * tensors[i].element_size() for i in indices) // 2, 0
        for index in indices:
            view = raw_bytes(tensors[index])
            for number, (start, end) in enumerate(pieces(len(view))):
                _receive_into(connection, memoryview(head))
                _receive_into(connection, view[start:end])
                digest = piece_digest(view[start:end])
                if digest != _DIGEST.unpack(head)[0]:
                    raise RestoreError(f"piece {number} of tensor {index} arrived with another digest than it was sent")
                digests[index].append(digest)
                if got < half <= got + end - start:
                    self._halfway()
                got += end - start


def _destination(own: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """The target's own tensor if bytes can go straight into it, otherwise a new one in host memory."""
    if own is not None and own.device.type == "cpu" and own.is_contiguous() and spec_of(own) == spec:
        return own.detach()
    return empty_like(spec)


def _send_block(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive_block(connection: socket.socket, limit: int) -> bytes:
    head = bytearray(_LENGTH.size)
    _receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise RestoreError(f"a block of {length} bytes is over the limit of {limit}")
    data = bytearray(length)
    _receive_into(connection, memoryview(data))
    return bytes(data)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:], min(len(view) - done, 2**20))
        if count == 0:
            raise RestoreError("the source ended in the middle of the transfer")
        done += count
