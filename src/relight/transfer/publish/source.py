"""Sources of an update's bytes: the interface, and a process that helps a publisher. No torch.

A process that holds the same weights as the publisher joins as a source, and the sources take turns: each fills every
n-th bucket. If one dies, another fills its bucket. Where the weights are divided over processes, each says which parts
it holds, and fills buckets of these.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from relight.errors import ProtocolError, TransferError, UsageError
from relight.transfer.io import messages as msg
from relight.transfer.io.buffers import Buffer, close_buffers, open_buffers
from relight.transfer.io.channel import Channel, connect, socket_path
from relight.transfer.io.lent import LentMemory
from relight.transfer.plan.division import ShardSpec, as_known, find_entries
from relight.transfer.plan.manifest import Manifest, differences
from relight.transfer.plan.plan import Bucket, plan_buckets

_FAILURES = (OSError, TransferError, UsageError, RuntimeError)  # that a source may meet; a device's are RuntimeErrors


class Source(Protocol):
    """An object that can fill buckets."""

    @property
    def manifest(self) -> Manifest: ...

    def settle(self) -> None:
        """Wait for whatever still changes the weights. Called before each update. May raise."""

    def fill(self, bucket: Bucket, view: memoryview) -> int:
        """Write the bucket into `view`, gaps as zeros; returns the xxh3 of its `nbytes` bytes. May raise."""


@runtime_checkable
class Lender(Source, Protocol):
    """A source whose bytes engines of this host may read where they lie, instead of a buffer."""

    memory: LentMemory

    def lend(self, bucket: Bucket) -> int:
        """Return what `fill` would return. Engines read the bucket from now on, until the update ends.

        If it changes before that, no engine accepts it.
        """


@runtime_checkable
class DeviceSource(Source, Protocol):
    """A source on a device that has buffers there as well, for engines on devices of this host."""

    device: str  # its name on this host
    handles: tuple[bytes, ...]  # by which other processes find the buffers
    near: str  # why only engines on the same device may import them; empty: others may, too

    def place(self, bucket: Bucket, buffer: int) -> int:
        """Write the bucket into a buffer on the device; return the digest that the device has computed."""


def why_copied(source: Source) -> str:
    """Return why a source has nothing better to offer than copies in shared buffers."""
    found: str = getattr(source, "unlendable", "the source makes each bucket when it is wanted")
    return found


class SourceLease(Protocol):
    """Permission to read a source's weights, for weights that change between updates."""

    def acquire(self, version: int) -> str:
        """Empty: the weights are those of `version`, and stay so until `release`. Otherwise why not."""

    def release(self) -> None:
        """Nothing is read any more. Also called without an `acquire` before it."""


class FixedVersion:
    """The lease of weights that never change."""

    def __init__(self, version: int) -> None:
        self._version = version

    def acquire(self, version: int) -> str:
        return "" if version == self._version else f"it holds version {self._version}"

    def release(self) -> None:
        pass


class SourceLink:
    """One process's part as a source besides the publisher. `run` serves until the publisher ends."""

    def __init__(
        self,
        place: str | Path,
        source: Source,
        *,
        version: int | None = None,
        lease: SourceLease | None = None,
        held: ShardSpec | None = None,
        name: str | None = None,
    ) -> None:
        """`source` holds `version` and no other, and does not change; or it is read under a `lease`.

        `held`: what it holds, if it is not all.
        """
        if (version is None) == (lease is None):
            raise UsageError("SourceLink needs either version= or lease=")
        self._path = socket_path(place)
        self._source = source
        self._lease: SourceLease = FixedVersion(version) if version is not None else lease  # type: ignore[assignment]
        self._held = held
        self._name = name or f"source-{os.getpid()}"
        self._channel: Any = None
        self._buffers: tuple[Buffer, ...] = ()
        self._buckets: tuple[Bucket, ...] = ()
        self._own: Mapping[int, int] | None = None  # index of a tensor in the update -> ours; None: the same
        self._update = -1
        self._is_stopped = False

    def run(self) -> None:
        """Fill buckets until the publisher closes the connection. Raises TransferError if it cannot be reached."""
        try:
            channel = self._channel = self._connect()
        except (OSError, ProtocolError) as error:
            raise TransferError(f"there is no publisher at {self._path}: {error}") from error
        try:
            if self._is_stopped:  # meanwhile
                return
            channel.send(
                msg.SourceHello(
                    protocol_version=msg.PROTOCOL_VERSION, name=self._name, pid=os.getpid(), held=self._held
                )
            )
            while (message := channel.receive()) is not None:
                match message:
                    case msg.Welcome():
                        self._buffers = self._open_buffers(channel, message)
                    case msg.Begin():
                        self._begin(channel, message)
                    case msg.WriteBucket():
                        self._write(channel, message)
                    case msg.AbandonUpdate() | msg.Release():
                        if message.update == self._update:
                            self._end()
                    case msg.Dismissed():
                        return
                    case msg.LoadBucket() | msg.CommitUpdate():
                        raise ProtocolError("a source loads nothing")
        except OSError:
            pass  # the publisher is gone, as at the end of the stream
        finally:
            self._end()
            channel.close()
            close_buffers(self._buffers)
            self._buffers = ()

    # --- how buckets get to the publisher: here by shared memory (see `remote_source` for other ways) ----------------
    def _connect(self) -> Any:
        """Raises OSError, ProtocolError or TransferError."""
        return Channel(connect(self._path), msg.FromPublisher)

    def _open_buffers(self, channel: Any, welcome: msg.Welcome) -> tuple[Buffer, ...]:
        """Return the buffers that buckets are written into. Raises TransferError."""
        descriptors, channel.descriptors = channel.descriptors, []
        return open_buffers(descriptors, welcome.buffer_bytes)

    def _hand_over(self, channel: Any, written: msg.BucketWritten, view: memoryview) -> None:
        """The bucket lies in `view`. Raises OSError."""
        del view  # the publisher's engines see it there
        channel.send(written)

    def stop(self) -> None:
        """Make `run` return, from another thread."""
        self._is_stopped = True
        if self._channel is not None:
            self._channel.break_off()

    def _begin(self, channel: Any, begin: msg.Begin) -> None:
        self._end()
        why = self._objection(begin) or self._lease.acquire(begin.version)
        if why:
            channel.send(msg.Refuse(update=begin.update, why=why))
            return
        try:
            self._source.settle()
        except _FAILURES as error:
            self._fail(channel, begin.update, error)
            return
        self._update = begin.update
        self._buckets = plan_buckets(begin.manifest, begin.bucket_bytes)
        channel.send(msg.Ready(update=begin.update))

    def _objection(self, begin: msg.Begin) -> str:
        own, offered = self._source.manifest, begin.manifest
        if bool(offered.parts) != (self._held is not None):
            which = "a part of" if self._held is not None else "all"
            return f"it holds {which} the weights, and this update takes them in another way"
        if self._held is not None:
            try:
                places = find_entries(own, offered.entries)
            except UsageError as error:
                return str(error)
            is_same = all(place == index for index, place in enumerate(places))
            self._own = None if is_same else {place: index for index, place in enumerate(places)}
            return ""
        why = "; ".join(differences(offered, own))
        return why or ("it has the same tensors in another order" if offered.entries != own.entries else "")

    def _end(self) -> None:
        """Nothing is read for the update that was under way, if there was one."""
        self._update = -1
        self._lease.release()

    def withdraw(self, why: str) -> None:
        """The weights are about to change: nothing is read of them any more. From another thread, under the lease."""
        update, channel = self._update, self._channel
        if update >= 0 and channel is not None:
            with contextlib.suppress(OSError):
                channel.send(msg.Refuse(update=update, why=why))

    def _fail(self, channel: Any, update: int, error: Exception) -> None:
        self._end()
        channel.send(msg.Refuse(update=update, why=f"{type(error).__name__}: {error}"))

    def _write(self, channel: Any, order: msg.WriteBucket) -> None:
        if order.update != self._update:
            return
        if not (0 <= order.bucket < len(self._buckets) and 0 <= order.buffer < len(self._buffers)):
            raise ProtocolError(f"there is no bucket {order.bucket} or no buffer {order.buffer}")
        started_ns = time.monotonic_ns()
        bucket, view = self._buckets[order.bucket], self._buffers[order.buffer].view
        try:
            digest = self._source.fill(bucket if self._own is None else as_known(bucket, self._own), view)
        except _FAILURES as error:
            self._fail(channel, order.update, error)
            return
        seconds = (time.monotonic_ns() - started_ns) / 1e9
        written = msg.BucketWritten(update=order.update, bucket=order.bucket, digest=digest, seconds=seconds)
        self._hand_over(channel, written, view[: bucket.nbytes])
