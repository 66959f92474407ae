"""Sources on other hosts than the publisher: what they write travels over TCP, into the publisher's buffers.

    source -> gate   what a source says; instead of BucketWritten: BucketPayload, and behind it the bytes of the bucket
    gate -> source   what the publisher says

Beside the publisher a gate speaks for each of them. Nobody here needs to digest what arrives: the source's digest goes
to the engines, and each of them verifies by it what it takes. No torch.
"""

import contextlib
import threading
from pathlib import Path

import msgspec

from relight.errors import ProtocolError, TransferError
from relight.transfer.io.buffers import Buffer, close_buffers, create_buffers, open_buffers
from relight.transfer.io.channel import Channel
from relight.transfer.io.messages import (
    AbandonUpdate,
    Begin,
    BucketWritten,
    FromPublisher,
    Ready,
    Refuse,
    Release,
    SourceHello,
    Welcome,
    WriteBucket,
)
from relight.transfer.io.tcp import TcpChannel, begin_connecting, discard, parse_endpoint
from relight.transfer.plan.division import ShardSpec
from relight.transfer.plan.plan import Bucket, plan_buckets
from relight.transfer.plan.schedule import IPC_BUFFERS
from relight.transfer.publish.publish_bridge import PublishBridge
from relight.transfer.publish.source import Source, SourceLease, SourceLink
from relight.wire.tls import Tls

BRIDGE, SOURCE = "source-bridge", "remote-source"


class BucketPayload(msgspec.Struct, frozen=True, tag=True):
    """What BucketWritten is from a source that shares no buffers: the bucket's bytes come right after it."""

    written: BucketWritten
    nbytes: int


FromSource = SourceHello | Ready | Refuse | BucketPayload


class SourceBridge(PublishBridge):
    """Lets sources on other hosts take part in what is published at `place`. `close` ends it."""

    roles = BRIDGE, SOURCE
    types = FromSource

    def _pass_on(self, publisher: Channel, stranger: TcpChannel) -> None:
        try:
            _SourceProxy(publisher, stranger).run()
        except (OSError, ProtocolError, TransferError) as error:
            self._on_notice(f"lost a source on another host: {error}")


class _SourceProxy:
    """What one source and the publisher say to each other."""

    def __init__(self, publisher: Channel, source: TcpChannel) -> None:
        self._publisher = publisher
        self._source = source
        self._lock = threading.Lock()
        self._buffers: tuple[Buffer, ...] = ()
        self._buckets: tuple[Bucket, ...] = ()
        self._update = -1  # that the source may write for; -1: none
        self._places: dict[int, int] = {}  # bucket -> buffer, of what it was told to write

    def run(self) -> None:
        """Until either connection ends. Raises OSError, ProtocolError or TransferError."""
        upwards = threading.Thread(target=self._carry_up, name="relight-bridge-up", daemon=True)
        upwards.start()
        try:
            self._carry_down()
        finally:
            self._source.break_off()
            self._publisher.break_off()
            upwards.join()
            self._publisher.close()
            close_buffers(self._buffers)

    def _carry_down(self) -> None:
        publisher = self._publisher
        while (message := publisher.receive()) is not None:
            match message:
                case Welcome():
                    descriptors, publisher.descriptors = publisher.descriptors, []
                    self._buffers = open_buffers(descriptors, message.buffer_bytes)
                case Begin():
                    buckets = plan_buckets(message.manifest, message.bucket_bytes)
                    with self._lock:
                        self._buckets, self._places, self._update = buckets, {}, message.update
                case WriteBucket():
                    with self._lock:
                        self._places[message.bucket] = message.buffer
                case AbandonUpdate() | Release():
                    with self._lock:
                        self._update = -1
            self._source.send(message)

    def _carry_up(self) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            while (message := self._source.receive()) is not None:
                if not isinstance(message, BucketPayload):
                    self._publisher.send(message)
                elif self._receive_bucket(message.written, message.nbytes):
                    self._publisher.send(message.written)
        self._publisher.break_off()

    def _receive_bucket(self, written: BucketWritten, nbytes: int) -> bool:
        """False: it was of an update that is over, and nobody has it."""
        with self._lock:
            is_awaited = written.update == self._update
            place = self._places.pop(written.bucket, None) if is_awaited else None
            planned = self._buckets[written.bucket].nbytes if place is not None else 0
        if not is_awaited:
            discard(self._source, nbytes)
            return False
        if place is None or nbytes != planned:
            raise ProtocolError(f"{nbytes} bytes came as bucket {written.bucket}, which it was not told to write so")
        if not self._source.receive_bytes([self._buffers[place].view[:nbytes]]):
            raise ConnectionResetError("it ended in the middle of a bucket")
        return True


class RemoteSourceLink(SourceLink):
    """A `SourceLink` to a publisher on another host."""

    def __init__(
        self,
        endpoint: str,
        source: Source,
        *,
        lease: SourceLease,
        held: ShardSpec | None = None,
        name: str,
        token: bytes,
        tls: Tls | None = None,
    ) -> None:
        """`endpoint`: the bridge's address. `token`: the secret that it shares. With `tls` it must have a certificate."""
        super().__init__(Path(endpoint), source, lease=lease, held=held, name=name)
        self._endpoint = endpoint
        self._token = token
        self._tls = tls

    def _connect(self) -> TcpChannel:
        host, _ = parse_endpoint(self._endpoint)
        channel = TcpChannel(
            begin_connecting(self._endpoint), self._token, FromPublisher, tls=self._tls, server_name=host
        )
        try:
            channel.introduce(SOURCE, BRIDGE)
        except BaseException:
            channel.close()
            raise
        return channel

    def _open_buffers(self, channel: TcpChannel, welcome: Welcome) -> tuple[Buffer, ...]:
        """Buckets are written here first."""
        del channel
        return create_buffers(IPC_BUFFERS, welcome.buffer_bytes)

    def _hand_over(self, channel: TcpChannel, written: BucketWritten, view: memoryview) -> None:
        channel.send(BucketPayload(written, len(view)))
        channel.send_bytes([view])

    def withdraw(self, why: str) -> None:
        """No words: they would have to wait for a bucket that is on its way. The link ends, and may be made again."""
        del why
        self.stop()
