"""Copy the state of healthy replicas to a replacement: the weights engine's buckets, point to point.

    target -> source   Request(generation, version, part, parts)
    source -> target   Header(tree, paths, specs, ...)
    source -> target   the buckets of the part, as the fabric carries them

Through shared buffers where source and target are on one host, through TCP elsewhere (`fabric`). With several sources
each sends every n-th bucket. The target receives straight into its own tensors: it is blank, so nothing good is ever
overwritten, and the state is not used before the last digest has matched. A source whose process dies ends the
connection, which the target reports at once.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from relight.device.choose import is_accelerated
from relight.errors import ProtocolError, RestoreError, TransferError, UsageError
from relight.transfer.io.channel import connect
from relight.transfer.io.codec import TensorSpec, empty_like, spec_of
from relight.transfer.plan.manifest import describe_bytes
from relight.transfer.plan.plan import Bucket
from relight.transfer.restore.fabric import Address, TargetEnd
from relight.transfer.restore.offer import Halfway, Header, Request, describe_state, part_of, plan_state
from relight.transfer.restore.shared_fabric import SharedTarget, SpareBuffer
from relight.transfer.restore.tcp_fabric import TcpTarget
from relight.transfer.tensors.weights import TensorWriter
from relight.wire.connection.tls import Tls

PROGRESS_SECONDS = 0.5  # between two reports of a copy; a shorter one is not reported

Copied = Callable[[int, int, float], None]  # bytes that have arrived, bytes in all, seconds since the beginning


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

    def fetch_meta(self, generation: int, version: int, address: Address) -> dict[str, Any]:
        """Return the meta data of a source's header, without a tensor. Raises RestoreError as `fetch`."""
        with contextlib.ExitStack() as stack:
            link = self._ask(stack, address, Request(generation, version, part=0, parts=1, only_meta=True))
            return self._header(link, generation, version).meta

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
            stack.callback(self._remove_link, link)
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

    def _remove_link(self, link: TargetEnd) -> None:
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
    """Counts the bytes of a copy that have arrived, for people. May be used from several threads."""

    def __init__(self, total_bytes: int, report: Copied | None) -> None:
        self._total_bytes = total_bytes
        self._report = report
        self._lock = threading.Lock()
        self._copied_bytes = 0
        self._begun = self._reported = time.monotonic()

    def add(self, count: int) -> None:
        if self._report is None:
            return
        with self._lock:
            self._copied_bytes += count
            now = time.monotonic()
            is_last = self._copied_bytes == self._total_bytes and self._reported > self._begun
            if is_last or now - self._reported >= PROGRESS_SECONDS:
                self._reported = now
                self._report(self._copied_bytes, self._total_bytes, now - self._begun)


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
    """Raise RestoreError for a state that this machine cannot hold, before anything is planned or allocated."""
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
    if (
        own is not None
        and (own.is_cpu or (on_device and is_accelerated(own)))
        and own.is_contiguous()
        and spec_of(own) == spec
    ):
        return own.detach()
    try:
        return empty_like(spec)
    except (RuntimeError, UsageError) as error:
        raise RestoreError(f"no memory for what the source describes: {error}") from error


def _shared(meta: dict[str, Any]) -> dict[str, Any]:
    """Return what sources of one version say alike. The rest each may say of itself alone: a clock, a count."""
    return {key: meta.get(key) for key in ("lineage", "until", "private_buffers", "memory")}
