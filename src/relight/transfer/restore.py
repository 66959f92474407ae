"""Copy the state of healthy replicas to a replacement: the weights engine's buckets, point to point.

    target -> source   Request(generation, version, part, parts)
    source -> target   Header(tree, paths, specs, ...)
    target -> source   Lend(buffer_bytes), with the descriptors of the target's buffers
    source -> target   for each bucket of the part: Filled(bucket, buffer, digest)
    target -> source   Taken(buffer): it may be filled again

While the target takes a bucket out of one buffer, the source fills the next. With several sources each sends every
n-th bucket, through buffers of its own. The target receives straight into its own tensors: it is blank, so
nothing good is ever overwritten, and nobody sees the state before the last digest has matched. A source whose process
dies ends the connection, which the target reports at once.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from relight.errors import ProtocolError, RestoreError, TransferError, UsageError
from relight.transfer.buffers import Buffer, close_buffers, create_buffers, open_buffers
from relight.transfer.channel import Channel, connect, listen
from relight.transfer.codec import Flat, TensorSpec, empty_like, spec_of
from relight.transfer.manifest import Entry, make_manifest
from relight.transfer.plan import Bucket, plan_buckets
from relight.transfer.schedule import IPC_BUFFERS
from relight.transfer.weights import TensorReader, TensorWriter

BUCKET_BYTES = 4 * 2**20
# Two IPC buffers, each in two halves: a source and a target of the same speed wait for each other less often.
BUFFERS = 2 * IPC_BUFFERS
HELLO_SECONDS = 30.0  # for a target to say what it wants
_OFFER_SECONDS = 600.0


class Request(msgspec.Struct, frozen=True, tag=True):
    """What a target asks a source for."""

    generation: int
    version: int
    part: int
    parts: int


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Buffers of the target's, for the source to fill; their descriptors come with it."""

    buffer_bytes: int


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The target has what lay in the buffer."""

    buffer: int


class Header(msgspec.Struct, frozen=True, tag=True):
    """What comes before the buckets."""

    generation: int
    version: int
    meta: dict[str, Any]
    tree: Any
    paths: list[str]
    specs: list[TensorSpec]
    error: str = ""


class Filled(msgspec.Struct, frozen=True, tag=True):
    """A bucket lies in a buffer."""

    bucket: int
    buffer: int
    digest: int


class Offer:
    """The state that a source serves during one generation."""

    def __init__(self, generation: int, version: int, meta: dict[str, Any], flat: Flat) -> None:
        self.header = Header(generation, version, meta, flat.tree, flat.paths, flat.specs)
        self.reader = TensorReader(flat.tensors)
        self.buckets = plan_state(flat.specs)
        # By bucket. Sending fills them from the front, the source's own state digest from the back.
        self.digests: dict[int, int] = {}


def plan_state(specs: Sequence[TensorSpec]) -> tuple[Bucket, ...]:
    """The buckets that a flattened state travels and is digested in; a tensor's index is its only name."""
    entries = (Entry(str(index), spec.dtype, spec.shape) for index, spec in enumerate(specs))
    return plan_buckets(make_manifest(entries), BUCKET_BYTES)


class RestoreServer:
    """Serves offers to whoever connects. One thread per connection; `withdraw` breaks them all."""

    def __init__(self, path: Path, halfway: Callable[[], None]) -> None:
        """`halfway` is called when half of a transfer is sent (by the first of several sources)."""
        self.address = str(path)
        self._halfway = halfway
        self._condition = threading.Condition()
        self._offer: Offer | None = None
        self._newest = 0
        self._channels: set[Channel] = set()
        self._listener = listen(path)
        self._listener.setblocking(True)
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
            for channel in self._channels:
                channel.break_off()
            self._condition.notify_all()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="relight-source", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection, Request | Lend | Taken)
        except (OSError, ProtocolError):
            connection.close()
            return
        with self._condition:
            self._channels.add(channel)
        buffers: tuple[Buffer, ...] = ()
        try:
            channel.set_timeout(HELLO_SECONDS)
            request = channel.receive()
            if not isinstance(request, Request) or not 0 <= request.part < request.parts:
                return
            channel.set_timeout(None)
            offer = self._await_offer(request)
            if offer is None:
                closed = Header(request.generation, request.version, {}, None, [], [], error="generation is closed")
                channel.send(closed)
                return
            channel.send(offer.header)
            mine = _part(offer.buckets, request.part, request.parts)
            if not mine:
                return
            buffers = _borrow(channel)
            self._send_part(channel, offer, mine, buffers, first=request.part == 0)
        except (OSError, ProtocolError, TransferError):
            pass  # the target sees the end of the connection, and knows why
        finally:
            with self._condition:
                self._channels.discard(channel)
            channel.close()
            close_buffers(buffers)

    def _await_offer(self, request: Request) -> Offer | None:
        def settled() -> bool:
            return self._newest > request.generation or self._matching(request) is not None

        with self._condition:
            self._condition.wait_for(settled, _OFFER_SECONDS)
            return self._matching(request)

    def _matching(self, request: Request) -> Offer | None:
        offer = self._offer
        if offer is None:
            return None
        return (
            offer if (offer.header.generation, offer.header.version) == (request.generation, request.version) else None
        )

    def _send_part(
        self, channel: Channel, offer: Offer, mine: Sequence[Bucket], buffers: Sequence[Buffer], *, first: bool
    ) -> None:
        if not buffers or min(buffer.nbytes for buffer in buffers) < max(bucket.nbytes for bucket in mine):
            raise ProtocolError("the target's buffers are too small")
        halfway = _Halfway(mine, self._halfway if first else None)
        for number, bucket in enumerate(mine):
            buffer = number % len(buffers)
            if number >= len(buffers):
                _expect_taken(channel)
            digest = offer.digests[bucket.index] = offer.reader.fill(bucket, buffers[buffer].view)
            halfway.pass_over(bucket)
            channel.send(Filled(bucket.index, buffer, digest))
        for _ in mine[-len(buffers) :]:
            _expect_taken(channel)


def _borrow(channel: Channel) -> tuple[Buffer, ...]:
    lent = channel.receive()
    if not isinstance(lent, Lend):
        raise ProtocolError("the target lends no buffers")
    descriptors, channel.descriptors = channel.descriptors, []
    return open_buffers(descriptors, lent.buffer_bytes)


def _expect_taken(channel: Channel) -> None:
    if not isinstance(channel.receive(), Taken):
        raise ProtocolError("the target does not want the rest")


def _part(buckets: Sequence[Bucket], part: int, parts: int) -> list[Bucket]:
    return [bucket for bucket in buckets if bucket.index % parts == part]


class _Halfway:
    """Calls once, in front of the bucket that crosses the middle of a transfer."""

    def __init__(self, buckets: Sequence[Bucket], call: Callable[[], None] | None) -> None:
        self._call = call
        self._half = sum(bucket.nbytes for bucket in buckets) // 2
        self._done = 0

    def pass_over(self, bucket: Bucket) -> None:
        if self._call is not None and self._done <= self._half < self._done + bucket.nbytes:
            self._call()
        self._done += bucket.nbytes


class Restored(msgspec.Struct, frozen=True):
    """A complete, verified copy: the header, one tensor per path, and the digests by bucket."""

    header: Header
    tensors: list[torch.Tensor]
    digests: dict[int, int]
    received_bytes: int


class RestoreClient:
    """Fetches a version from one or several sources. `cancel` breaks it off from another thread."""

    def __init__(self, halfway: Callable[[], None], timeout_seconds: float) -> None:
        """`halfway` is called when half has arrived (of the first source's part)."""
        self._halfway = halfway
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._cancelled = False

    def cancel(self) -> None:
        """Make `fetch` raise RestoreError soon."""
        with self._lock:
            self._cancelled = True
            for channel in self._channels:
                channel.break_off()

    def fetch(
        self, generation: int, version: int, addresses: Sequence[str], destination: Callable[[str], torch.Tensor | None]
    ) -> Restored:
        """Copy `version` from `addresses`, every n-th bucket from each.

        `destination(path)` gives the tensor to receive into, if the target has one; otherwise one is made.
        Raises RestoreError on a broken connection, a digest that does not match, or sources that disagree.
        """
        parts = len(addresses)
        with contextlib.ExitStack() as stack:
            channels = []
            for part, address in enumerate(addresses):
                channels.append(self._ask(stack, address, Request(generation, version, part, parts)))
            headers = [self._header(channel, generation, version) for channel in channels]
            first = headers[0]
            if any((h.paths, h.specs, h.meta) != (first.paths, first.specs, first.meta) for h in headers[1:]):
                raise RestoreError("two sources describe the same version differently")
            try:
                buckets = plan_state(first.specs)
            except UsageError as error:
                raise RestoreError(f"the source describes a state that cannot be: {error}") from error
            tensors = [_destination(destination(p), spec) for p, spec in zip(first.paths, first.specs, strict=True)]
            shares = [_part(buckets, part, parts) for part in range(parts)]
            buffers = [self._lend(stack, channel, share) for channel, share in zip(channels, shares, strict=True)]
            digests = self._receive(channels, buffers, shares, tensors)
        return Restored(first, tensors, digests, sum(t.numel() * t.element_size() for t in tensors))

    def _lend(self, stack: contextlib.ExitStack, channel: Channel, share: Sequence[Bucket]) -> tuple[Buffer, ...]:
        """Make buffers for this source's part, no more and no larger than it needs."""
        if not share:
            return ()
        nbytes = max(bucket.nbytes for bucket in share)
        try:
            buffers = create_buffers(min(BUFFERS, len(share)), nbytes)
            stack.callback(close_buffers, buffers)
            channel.send(Lend(nbytes), [buffer.descriptor for buffer in buffers])
        except TransferError as error:
            raise RestoreError(str(error)) from error
        except OSError as error:
            raise RestoreError(f"the source ended in the middle of the transfer: {error}") from error
        return buffers

    def _ask(self, stack: contextlib.ExitStack, address: str, request: Request) -> Channel:
        try:
            channel = Channel(connect(Path(address)), Header | Filled)
        except (OSError, TransferError, ProtocolError) as error:
            raise RestoreError(f"the source at {os.path.basename(address)} cannot be reached: {error}") from error
        stack.callback(channel.close)
        with self._lock:
            if self._cancelled:
                raise RestoreError("cancelled")
            self._channels.append(channel)
        stack.callback(self._forget, channel)
        channel.set_timeout(self._timeout_seconds)
        try:
            channel.send(request)
        except OSError as error:
            raise RestoreError(f"the source at {os.path.basename(address)} cannot be reached: {error}") from error
        return channel

    def _forget(self, channel: Channel) -> None:
        with self._lock:
            self._channels.remove(channel)

    def _header(self, channel: Channel, generation: int, version: int) -> Header:
        try:
            header = channel.receive()
        except (OSError, ProtocolError) as error:
            raise RestoreError(f"the source ended before it described its state: {error}") from error
        if not isinstance(header, Header):
            raise RestoreError("the source ended before it described its state")
        if header.error or (header.generation, header.version) != (generation, version):
            raise RestoreError(header.error or f"the source offers version {header.version}, not {version}")
        return header

    def _receive(
        self,
        channels: Sequence[Channel],
        buffers: Sequence[Sequence[Buffer]],
        shares: Sequence[Sequence[Bucket]],
        tensors: Sequence[torch.Tensor],
    ) -> dict[int, int]:
        writer = TensorWriter(dict(enumerate(tensors)))
        digests: dict[int, int] = {}
        errors: list[Exception] = []

        def receive(part: int) -> None:
            try:
                self._receive_part(channels[part], buffers[part], shares[part], writer, digests, part=part)
            except (OSError, ProtocolError, RestoreError) as error:
                errors.append(error)
                for channel in channels:  # the other parts are of no use now
                    channel.break_off()

        others = [threading.Thread(target=receive, args=(part,)) for part in range(1, len(channels))]
        for thread in others:
            thread.start()
        receive(0)
        for thread in others:
            thread.join()
        if errors:
            raise RestoreError(str(errors[0])) from errors[0]
        return digests

    def _receive_part(
        self,
        channel: Channel,
        buffers: Sequence[Buffer],
        mine: Sequence[Bucket],
        writer: TensorWriter,
        digests: dict[int, int],
        *,
        part: int,
    ) -> None:
        halfway = _Halfway(mine, self._halfway if part == 0 else None)
        for bucket in mine:
            filled = channel.receive()
            if filled is None:
                raise RestoreError("the source ended in the middle of the transfer")
            if not isinstance(filled, Filled) or filled.bucket != bucket.index or not 0 <= filled.buffer < len(buffers):
                raise RestoreError("the source sends something else than it was asked for")
            halfway.pass_over(bucket)
            digest = writer.load(bucket, buffers[filled.buffer].view)
            if digest != filled.digest:
                raise RestoreError(f"bucket {bucket.index} arrived with another digest than it was sent")
            digests[bucket.index] = digest
            channel.send(Taken(filled.buffer))


def _destination(own: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """The target's own tensor if bytes can go straight into it, otherwise a new one in host memory."""
    if own is not None and own.device.type == "cpu" and own.is_contiguous() and spec_of(own) == spec:
        return own.detach()
    return empty_like(spec)
