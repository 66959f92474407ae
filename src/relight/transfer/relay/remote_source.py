"""Sources on other hosts than the publisher: their buckets travel over TCP, into the publisher's buffers.

    source -> bridge   a source's messages; instead of BucketWritten: BucketPayload, and then the bytes of the bucket
    bridge -> source   the publisher's messages

On the publisher's host a proxy stands for each of them. It need not digest the bytes: the source's digest goes to the
engines, and each of them verifies the bytes that it takes. No torch.
"""

import contextlib
import threading
from pathlib import Path

import msgspec

from relight.errors import ProtocolError, TransferError
from relight.transfer.io import messages as msg
from relight.transfer.io.buffers import Buffer, close_buffers, create_buffers, open_buffers
from relight.transfer.io.channel import Channel
from relight.transfer.io.tcp import TcpChannel, begin_connecting, discard, parse_endpoint
from relight.transfer.plan.division import ShardSpec
from relight.transfer.plan.plan import Bucket, plan_buckets
from relight.transfer.plan.schedule import IPC_BUFFERS
from relight.transfer.publish.source import Source, SourceLease, SourceLink
from relight.transfer.relay.publish_bridge import PublishBridge
from relight.wire.connection.tls import Tls

BRIDGE, SOURCE = "source-bridge", "remote-source"


class BucketPayload(msgspec.Struct, frozen=True, tag=True):
    """BucketWritten from a source that shares no buffers: the bucket's bytes come right after it."""

    written: msg.BucketWritten
    nbytes: int


FromSource = msg.SourceHello | msg.Ready | msg.Refuse | BucketPayload


class SourceBridge(PublishBridge):
    """Lets sources on other hosts take part in the updates published at `place`, until `close`."""

    roles = BRIDGE, SOURCE
    types = FromSource

    def _pass_on(self, publisher: Channel, stranger: TcpChannel) -> None:
        try:
            _SourceProxy(publisher, stranger).run()
        except (OSError, ProtocolError, TransferError) as error:
            self._on_notice(f"lost a source on another host: {error}")


class _SourceProxy:
    """Stands for one remote source at the publisher: forwards the messages of both."""

    def __init__(self, publisher: Channel, source: TcpChannel) -> None:
        self._publisher = publisher
        self._source = source
        self._lock = threading.Lock()
        self._buffers: tuple[Buffer, ...] = ()
        self._buckets: tuple[Bucket, ...] = ()
        self._update = -1  # that the source may write for; -1: none
        self._places: dict[int, int] = {}  # bucket -> buffer, of those that it was ordered to write

    def run(self) -> None:
        """Forward messages until either connection ends. Raises OSError, ProtocolError or TransferError."""
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
                case msg.Welcome():
                    descriptors, publisher.descriptors = publisher.descriptors, []
                    self._buffers = open_buffers(descriptors, message.buffer_bytes)
                case msg.Begin():
                    buckets = plan_buckets(message.manifest, message.bucket_bytes)
                    with self._lock:
                        self._buckets, self._places, self._update = buckets, {}, message.update
                case msg.WriteBucket():
                    with self._lock:
                        self._places[message.bucket] = message.buffer
                case msg.AbandonUpdate() | msg.Release():
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

    def _receive_bucket(self, written: msg.BucketWritten, nbytes: int) -> bool:
        """Receive a bucket into its buffer. Returns False for one of an update that has ended: it is discarded."""
        with self._lock:
            is_awaited = written.update == self._update
            place = self._places.pop(written.bucket, None) if is_awaited else None
            planned = self._buckets[written.bucket].nbytes if place is not None else 0
        if not is_awaited:
            discard(self._source, nbytes)
            return False
        if place is None or nbytes != planned:
            raise ProtocolError(f"{nbytes} bytes came as bucket {written.bucket}, which it was not ordered to write so")
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
        """`endpoint`: the bridge's address; `token`: the secret that it shares. With `tls` it needs a certificate."""
        super().__init__(Path(endpoint), source, lease=lease, held=held, name=name)
        self._endpoint = endpoint
        self._token = token
        self._tls = tls

    def _connect(self) -> TcpChannel:
        host, _ = parse_endpoint(self._endpoint)
        channel = TcpChannel(
            begin_connecting(self._endpoint), self._token, msg.FromPublisher, tls=self._tls, server_name=host
        )
        try:
            channel.introduce(SOURCE, BRIDGE)
        except BaseException:
            channel.close()
            raise
        return channel

    def _open_buffers(self, channel: TcpChannel, welcome: msg.Welcome) -> tuple[Buffer, ...]:
        """Make buffers of this process, from which buckets are sent."""
        del channel
        return create_buffers(IPC_BUFFERS, welcome.buffer_bytes)

    def _hand_over(self, channel: TcpChannel, written: msg.BucketWritten, view: memoryview) -> None:
        channel.send(BucketPayload(written, len(view)))
        channel.send_bytes([view])

    def withdraw(self, why: str) -> None:
        """End the link, which may be made again: a message would have to wait for a bucket that is being sent."""
        del why
        self.stop()
