"""Copy the state of healthy replicas to a replacement: the weights engine's buckets, point to point.

    target -> source   Request(generation, version, part, parts)
    source -> target   Header(tree, paths, specs, ...)
    source -> target   the buckets of the part, as the fabric carries them

Through shared buffers where source and target are on one host, through TCP elsewhere (`fabric`). With several sources
each sends every n-th bucket. The target receives straight into its own tensors: it is blank, so nothing good is ever
overwritten, and nobody sees the state before the last digest has matched. A source whose process dies ends the
connection, which the target reports at once.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from relight.errors import ProtocolError, RestoreError, TransferError, UsageError
from relight.transfer.io.channel import connect, listen
from relight.transfer.io.codec import TensorSpec, empty_like, spec_of
from relight.transfer.io.tcp import Strangers, accept_forever, listen_on
from relight.transfer.plan.manifest import describe_bytes
from relight.transfer.plan.plan import Bucket
from relight.transfer.restore.fabric import Address, SourceEnd, TargetEnd
from relight.transfer.restore.offer import Halfway, Header, Offer, Request, describe_state, part_of, plan_state
from relight.transfer.restore.shared_fabric import SharedSource, SharedTarget, SpareBuffer
from relight.transfer.restore.tcp_fabric import SOURCE, TARGET, TcpSource, TcpTarget
from relight.transfer.tensors.weights import TensorWriter
from relight.wire.tls import Tls

HELLO_SECONDS = 30.0  # for a target to say what it wants
_OFFER_SECONDS = 600.0
PROGRESS_SECONDS = 0.5  # between two words about a copy; one that is over sooner is not spoken of

Copied = Callable[[int, int, float], None]  # bytes that have arrived, bytes in all, seconds since the beginning


class RestoreServer:
    """Serves offers to whoever connects. One thread per connection; `withdraw` breaks them all."""

    def __init__(
        self,
        path: Path,
        halfway: Callable[[], None],
        *,
        host_address: str = "",
        token: bytes = b"",
        tls: Tls | None = None,
    ) -> None:
        """Serve at the Unix socket `path`; other hosts too, at `host_address`, if it is given.

        `halfway` is called when half of a transfer is sent (by the first of several sources). `token` is what proves
        that a target on another host is of this job; `tls`, if there is any, is spoken with it. Raises TransferError if
        an address cannot be used.
        """
        self._halfway = halfway
        self._token = token
        self._tls = tls
        self._condition = threading.Condition()
        self._offer: Offer | None = None
        self._kept: dict[tuple[int, int], Offer] = {}  # snapshots, by rank and version
        self._serving: dict[SourceEnd, Offer] = {}
        self._newest = 0
        self._links: set[SourceEnd] = set()
        self._strangers = Strangers()
        listener = listen(path)
        listener.setblocking(True)
        accept_forever(listener, self._serve_here, "relight-source")
        endpoint = ""
        if host_address:
            tcp_listener, endpoint = listen_on(host_address)
            accept_forever(tcp_listener, self._serve_elsewhere, "relight-source-tcp")
        self.address = Address(str(path), endpoint)

    def offer(self, offer: Offer) -> None:
        """Serve this state from now on."""
        with self._condition:
            self._offer = offer
            self._condition.notify_all()

    def keep(self, rank: int, offer: Offer) -> None:
        """Serve this snapshot of a rank's state as well, in any generation, until it is to be forgotten."""
        with self._condition:
            self._kept[rank, offer.header.version] = offer
            self._condition.notify_all()

    def forget(self, rank: int, offer: Offer) -> None:
        """Do not serve that snapshot any more; nobody reads it when this returns."""
        key = (rank, offer.header.version)
        with self._condition:
            if self._kept.get(key) is offer:
                del self._kept[key]
            for link, served in self._serving.items():
                if served is offer:
                    link.break_off()
            self._condition.wait_for(lambda: all(served is not offer for served in self._serving.values()))

    def withdraw(self, generation: int) -> None:
        """Serve nothing older than `generation`; transfers under way are broken off."""
        with self._condition:
            self._newest = max(self._newest, generation)
            if self._offer is not None and self._offer.header.generation < self._newest:
                self._offer = None
            for link in self._links:
                link.break_off()
            self._condition.notify_all()

    def _serve_here(self, connection: socket.socket) -> None:
        try:
            link = SharedSource(connection)
        except (OSError, ProtocolError):
            connection.close()
            return
        self._serve(link)

    def _serve_elsewhere(self, connection: socket.socket) -> None:
        try:
            link = TcpSource(connection, self._token, self._tls)
        except ProtocolError:
            connection.close()
            return
        try:
            self._strangers.admit(link, SOURCE, TARGET)
        except (OSError, ProtocolError):
            link.close()
            return
        self._serve(link)

    def _serve(self, link: SourceEnd) -> None:
        with self._condition:
            self._links.add(link)
        try:
            link.set_timeout(HELLO_SECONDS)
            request = link.receive()
            if not isinstance(request, Request) or not 0 <= request.part < request.parts:
                return
            link.set_timeout(None)
            offer = self._await_offer(request, link)
            if offer is None:
                closed = Header(request.generation, request.version, {}, None, [], [], error="generation is closed")
                link.send(closed)
                return
            link.send(msgspec.structs.replace(offer.header, generation=request.generation))
            mine = part_of(offer.buckets, request.part, request.parts)
            planned = self._halfway if request.part == 0 and request.of < 0 else None
            if mine:
                _send_part(link, offer, mine, Halfway(mine, planned))
        except (OSError, ProtocolError, TransferError):
            pass  # the target sees the end of the connection, and knows why
        finally:
            with self._condition:
                self._links.discard(link)
                self._serving.pop(link, None)
                self._condition.notify_all()
            link.close()

    def _await_offer(self, request: Request, link: SourceEnd) -> Offer | None:
        def settled() -> bool:
            return self._newest > request.generation or self._matching(request) is not None

        with self._condition:
            self._condition.wait_for(settled, _OFFER_SECONDS)
            offer = self._matching(request)
            if offer is not None:
                self._serving[link] = offer
            return offer

    def _matching(self, request: Request) -> Offer | None:
        if request.of >= 0:
            return self._kept.get((request.of, request.version)) if request.generation >= self._newest else None
        offer = self._offer
        if offer is None:
            return None
        return (
            offer if (offer.header.generation, offer.header.version) == (request.generation, request.version) else None
        )


def _send_part(link: SourceEnd, offer: Offer, mine: Sequence[Bucket], halfway: Halfway) -> None:
    link.prepare(mine)
    for bucket in mine:
        halfway.pass_over(bucket)
        known = offer.digests.get(bucket.index)  # the source digests its state meanwhile, from the other end
        offer.digests[bucket.index] = link.send_bucket(offer.reader, bucket, known)
    link.finish()


class Restored(msgspec.Struct, frozen=True):
    """A complete, verified copy: the header, one tensor per path, and the digests by bucket."""

    header: Header
    tensors: list[torch.Tensor]
    digests: dict[int, int]
    received_bytes: int


class RestoreClient:
    """Fetches a version from one or several sources. `cancel` breaks it off from another thread."""

    def __init__(
        self,
        halfway: Callable[[], None],
        timeout_seconds: float,
        token: bytes = b"",
        on_progress: Copied | None = None,
        tls: Tls | None = None,
        *,
        spare: SpareBuffer | None = None,
    ) -> None:
        """`halfway` is called when half has arrived (of the first source's part).

        `token` is what proves to a source on another host that this target is of its job, and `tls`, if there is any,
        is spoken with it. `on_progress` is called now and then during a long copy, and at its end; from any thread.
        `spare`: for copies from one source each, beside training; see there.
        """
        self._spare = spare
        self._halfway = halfway
        self._on_progress = on_progress
        self._timeout_seconds = timeout_seconds
        self._token = token
        self._tls = tls
        self._lock = threading.Lock()
        self._links: list[TargetEnd] = []
        self._cancelled = False

    def cancel(self) -> None:
        """Make `fetch` raise RestoreError soon."""
        with self._lock:
            self._cancelled = True
            for link in self._links:
                link.break_off()

    def fetch(
        self,
        generation: int,
        version: int,
        addresses: Sequence[Address],
        destination: Callable[[str], torch.Tensor | None],
        of: int = -1,
    ) -> Restored:
        """Copy `version` from `addresses`, every n-th bucket from each.

        `destination(path)` gives the tensor to receive into, if the target has one; otherwise one is made. `of`: the
        rank whose snapshot of that version is wanted, instead of the state that a source holds itself.
        Raises RestoreError on a broken connection, a digest that does not match, or sources that disagree.
        """
        try:
            return self._fetch(generation, version, addresses, destination, of)
        except RestoreError as error:
            if self._cancelled:  # whatever it looks like from here
                raise RestoreError("cancelled: a newer generation was opened") from error
            raise

    def _fetch(
        self,
        generation: int,
        version: int,
        addresses: Sequence[Address],
        destination: Callable[[str], torch.Tensor | None],
        of: int,
    ) -> Restored:
        parts = len(addresses)
        with contextlib.ExitStack() as stack:
            links = []
            for part, address in enumerate(addresses):
                links.append(self._ask(stack, address, Request(generation, version, part, parts, of)))
            headers = [self._header(link, generation, version) for link in links]
            first = headers[0]
            shared = (first.paths, first.specs, _shared(first.meta))
            if any((h.paths, h.specs, _shared(h.meta)) != shared for h in headers[1:]):
                raise RestoreError("two sources describe the same version differently")
            _check(first)
            buckets = plan_state(first.specs)
            described = zip(first.paths, first.specs, strict=True)
            tensors = [destination_for(destination(path), spec, on_device=True) for path, spec in described]
            shares = [part_of(buckets, part, parts) for part in range(parts)]
            digests = self._receive(links, shares, tensors)
        return Restored(first, tensors, digests, sum(t.numel() * t.element_size() for t in tensors))

    def _ask(self, stack: contextlib.ExitStack, address: Address, request: Request) -> TargetEnd:
        try:
            link = self._reach(address)
            stack.callback(link.close)
            with self._lock:
                if self._cancelled:
                    raise RestoreError("cancelled")
                self._links.append(link)
            stack.callback(self._forget, link)
            link.establish(self._timeout_seconds)
            link.send(request)
        except (OSError, TransferError, ProtocolError) as error:
            where = address.endpoint or os.path.basename(address.path)
            raise RestoreError(f"the source at {where} cannot be reached: {error}") from error
        return link

    def _reach(self, address: Address) -> TargetEnd:
        """Through the source's Unix socket if it is on this host: that it can be reached is the proof."""
        try:
            return SharedTarget(connect(Path(address.path)), self._spare)
        except (OSError, TransferError):
            if not address.endpoint:
                raise
        return TcpTarget(address.endpoint, self._token, self._tls)

    def _forget(self, link: TargetEnd) -> None:
        with self._lock:
            self._links.remove(link)

    def _header(self, link: TargetEnd, generation: int, version: int) -> Header:
        try:
            header = link.receive()
        except (OSError, ProtocolError) as error:
            raise RestoreError(f"the source ended before it described its state: {error}") from error
        if not isinstance(header, Header):
            raise RestoreError("the source ended before it described its state")
        if header.error or (header.generation, header.version) != (generation, version):
            raise RestoreError(header.error or f"the source offers version {header.version}, not {version}")
        return header

    def _receive(
        self, links: Sequence[TargetEnd], shares: Sequence[Sequence[Bucket]], tensors: Sequence[torch.Tensor]
    ) -> dict[int, int]:
        writer = TensorWriter(dict(enumerate(tensors)))
        digests: dict[int, int] = {}
        errors: list[Exception] = []
        tally = _Tally(sum(bucket.nbytes for share in shares for bucket in share), self._on_progress)

        def receive(part: int) -> None:
            halfway = Halfway(shares[part], self._halfway if part == 0 else None)
            try:
                if shares[part]:
                    _receive_part(links[part], shares[part], writer, digests, halfway, tally)
            except Exception as error:  # a device has errors of its own; whatever it is, this part is not here
                errors.append(error)
                for link in links:  # the other parts are of no use now
                    link.break_off()

        others = [threading.Thread(target=receive, args=(part,)) for part in range(1, len(links))]
        for thread in others:
            thread.start()
        receive(0)
        for thread in others:
            thread.join()
        if errors:
            raise RestoreError(_describe(errors[0])) from errors[0]
        return digests


class _Tally:
    """How much of a copy has arrived, for people. Several threads count."""

    def __init__(self, total_bytes: int, told: Copied | None) -> None:
        self._total_bytes = total_bytes
        self._told = told
        self._lock = threading.Lock()
        self._copied_bytes = 0
        self._begun = self._said = time.monotonic()

    def add(self, count: int) -> None:
        if self._told is None:
            return
        with self._lock:
            self._copied_bytes += count
            now = time.monotonic()
            is_last = self._copied_bytes == self._total_bytes and self._said > self._begun
            if is_last or now - self._said >= PROGRESS_SECONDS:
                self._said = now
                self._told(self._copied_bytes, self._total_bytes, now - self._begun)


def _receive_part(
    link: TargetEnd,
    mine: Sequence[Bucket],
    writer: TensorWriter,
    digests: dict[int, int],
    halfway: Halfway,
    tally: _Tally,
) -> None:
    link.prepare(mine)
    for bucket in mine:
        halfway.pass_over(bucket)
        digests[bucket.index] = link.receive_bucket(writer, bucket)
        tally.add(bucket.nbytes)
    link.finish()


def _describe(error: Exception) -> str:
    return f"the source ended in the middle of the transfer: {error}" if isinstance(error, OSError) else str(error)


def _check(header: Header) -> None:
    """Before anything is planned or allocated: raises RestoreError for a state that this machine cannot hold."""
    try:
        total_bytes = describe_state(header.specs).total_bytes
    except UsageError as error:
        raise RestoreError(f"the source describes a state that cannot be: {error}") from error
    if len(header.paths) != len(header.specs):
        raise RestoreError("the source describes a state that cannot be: it has not one path for each tensor")
    if total_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise RestoreError(f"the source describes {describe_bytes(total_bytes)}, more than this machine can hold")


def destination_for(own: torch.Tensor | None, spec: TensorSpec, *, on_device: bool = False) -> torch.Tensor:
    """The target's own tensor if bytes can go straight into it, otherwise a new one in host memory.

    `on_device`: they can go into the memory of a device as well.
    """
    places = ("cpu", "cuda") if on_device else ("cpu",)
    if own is not None and own.device.type in places and own.is_contiguous() and spec_of(own) == spec:
        return own.detach()
    try:
        return empty_like(spec)
    except (RuntimeError, UsageError) as error:
        raise RestoreError(f"no memory for what the source describes: {error}") from error


def _shared(meta: dict[str, Any]) -> dict[str, Any]:
    """Less what a source says of itself alone."""
    return {key: value for key, value in meta.items() if key != "attributes"}
