"""A restore between hosts: buckets go through a TCP connection, from the source's tensors into the target's.

    source -> target   for each bucket: its bytes, then BucketReady(bucket, 0, digest)
    target -> source   BufferFree(0), once everything is there

No buffer of ours lies between: the kernel's send and receive buffers hold what is on the way. While they drain and
fill, the source digests the next few bytes before it sends them, and the target those that have just arrived, each
while they are in its core's cache. A thread for each stage was slower: it digests what the cache has lost.
"""

import socket
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from relight.errors import ProtocolError, RestoreError
from relight.transfer.io.tcp import TcpChannel, begin_connecting, parse_endpoint
from relight.transfer.plan.plan import Bucket
from relight.transfer.restore.fabric import ENDED, MISMATCH, other_digest
from relight.transfer.restore.offer import BucketReady, BufferFree, ToSource, ToTarget
from relight.transfer.tensors.weights import TensorReader, TensorWriter
from relight.wire.connection.tls import Tls

CHUNK_BYTES = 2**18  # sent or received, and digested, at a time
_MAX_VIEWS = 256  # in one system call; the kernel takes 1024
SOURCE, TARGET = "source", "target"


class TcpSource(TcpChannel):
    """The source's end (`fabric.SourceEnd`), of a connection that was accepted."""

    def __init__(self, connection: socket.socket, token: bytes, tls: Tls | None = None) -> None:
        super().__init__(connection, token, ToSource, tls=tls)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        pass

    def send_bucket(self, reader: TensorReader, bucket: Bucket, known: int | None) -> int:
        digest = xxhash.xxh3_64()
        for chunk in chunks(reader.views(bucket)):
            if known is None:
                for view in chunk:
                    digest.update(view)
            self.send_bytes(chunk)
        sent = digest.intdigest() if known is None else known
        self.send(BucketReady(bucket.index, 0, sent))
        return sent

    def finish(self) -> None:
        if not isinstance(self.receive(), BufferFree):
            raise ProtocolError("the target did not get everything")


class TcpTarget(TcpChannel):
    """The target's end (`fabric.TargetEnd`)."""

    def __init__(self, endpoint: str, token: bytes, tls: Tls | None = None) -> None:
        """Begin to connect. Raises OSError or TransferError."""
        host, _ = parse_endpoint(endpoint)
        super().__init__(begin_connecting(endpoint), token, ToTarget, tls=tls, server_name=host)

    def establish(self, timeout_seconds: float) -> None:
        self.introduce(TARGET, SOURCE)
        self.set_timeout(timeout_seconds)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        pass

    def receive_bucket(self, writer: TensorWriter, bucket: Bucket) -> int:
        digest = xxhash.xxh3_64()
        with writer.places(bucket) as places:
            for chunk in chunks(places):
                if not self.receive_bytes(chunk):
                    raise RestoreError(ENDED)
                for view in chunk:
                    digest.update(view)
        filled = self.receive()
        if filled is None:
            raise RestoreError(ENDED)
        if not isinstance(filled, BucketReady) or filled.bucket != bucket.index:
            raise RestoreError(MISMATCH)
        if digest.intdigest() != filled.digest:
            raise RestoreError(other_digest(bucket))
        return digest.intdigest()

    def finish(self) -> None:
        self.send(BufferFree(0))


def chunks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Split views into lists of at most CHUNK_BYTES, few enough for one system call."""
    chunk: list[memoryview] = []
    left = CHUNK_BYTES
    for view in views:
        rest = view
        while rest:
            if not left or len(chunk) == _MAX_VIEWS:
                yield chunk
                chunk, left = [], CHUNK_BYTES
            chunk.append(rest[:left])
            rest = rest[left:]
            left -= len(chunk[-1])
    if chunk:
        yield chunk
