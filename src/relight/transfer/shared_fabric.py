"""A restore on one host: the target lends buffers of shared memory, the source fills them in turn.

    target -> source   Lend(buffer_bytes), with the descriptors of the target's buffers
    source -> target   for each bucket: Filled(bucket, buffer, digest)
    target -> source   Taken(buffer): it may be filled again

While the target takes a bucket out of one buffer, the source fills the next.
"""

import socket
from collections.abc import Sequence

from relight.errors import ProtocolError, RestoreError
from relight.transfer.buffers import Buffer, close_buffers, create_buffers, open_buffers
from relight.transfer.channel import Channel
from relight.transfer.fabric import ENDED, MISMATCH, other_digest
from relight.transfer.offer import Filled, Lend, Taken, ToSource, ToTarget
from relight.transfer.plan import Bucket
from relight.transfer.schedule import IPC_BUFFERS
from relight.transfer.weights import TensorReader, TensorWriter

# Two IPC buffers, each in two halves: a source and a target of the same speed wait for each other less often.
BUFFERS = 2 * IPC_BUFFERS
# Beside training nobody waits for the copy, and finding and mapping memory takes from the cores that compute.
BUFFERS_BESIDE = 1


class SharedSource(Channel):
    """The source's end (`fabric.SourceEnd`)."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, ToSource)
        self._buffers: tuple[Buffer, ...] = ()
        self._sent = 0

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        lent = self.receive()
        if not isinstance(lent, Lend):
            raise ProtocolError("the target lends no buffers")
        descriptors, self.descriptors = self.descriptors, []
        self._buffers = open_buffers(descriptors, lent.buffer_bytes)
        if not self._buffers or lent.buffer_bytes < max(bucket.nbytes for bucket in buckets):
            raise ProtocolError("the target's buffers are too small")

    def send_bucket(self, reader: TensorReader, bucket: Bucket, known: int | None) -> int:
        if self._sent >= len(self._buffers):
            self._expect_taken()
        number = self._sent % len(self._buffers)
        view = self._buffers[number].view
        if known is None:
            digest = reader.fill(bucket, view)
        else:
            digest = known
            reader.write(bucket, view)
        self.send(Filled(bucket.index, number, digest))
        self._sent += 1
        return digest

    def finish(self) -> None:
        for _ in range(min(self._sent, len(self._buffers))):
            self._expect_taken()

    def close(self) -> None:
        super().close()
        close_buffers(self._buffers)
        self._buffers = ()

    def _expect_taken(self) -> None:
        if not isinstance(self.receive(), Taken):
            raise ProtocolError("the target does not want the rest")


class SharedTarget(Channel):
    """The target's end (`fabric.TargetEnd`)."""

    def __init__(self, connection: socket.socket, most_buffers: int = BUFFERS) -> None:
        super().__init__(connection, ToTarget)
        self._most_buffers = most_buffers
        self._buffers: tuple[Buffer, ...] = ()

    def establish(self, timeout_seconds: float) -> None:
        self.set_timeout(timeout_seconds)  # it is connected, and the kernel has told who the source is

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Make buffers, no more and no larger than these buckets need."""
        nbytes = max(bucket.nbytes for bucket in buckets)
        self._buffers = create_buffers(min(self._most_buffers, len(buckets)), nbytes)
        self.send(Lend(nbytes), [buffer.descriptor for buffer in self._buffers])

    def receive_bucket(self, writer: TensorWriter, bucket: Bucket) -> int:
        filled = self.receive()
        if filled is None:
            raise RestoreError(ENDED)
        if not isinstance(filled, Filled) or filled.bucket != bucket.index:
            raise RestoreError(MISMATCH)
        if not 0 <= filled.buffer < len(self._buffers):
            raise RestoreError(MISMATCH)
        digest = writer.load(bucket, self._buffers[filled.buffer].view)
        if digest != filled.digest:
            raise RestoreError(other_digest(bucket))
        self.send(Taken(filled.buffer))
        return digest

    def finish(self) -> None:
        pass  # it was told of each bucket

    def close(self) -> None:
        super().close()
        close_buffers(self._buffers)
        self._buffers = ()
