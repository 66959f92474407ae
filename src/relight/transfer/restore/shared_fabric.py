"""A restore on one host: the target lends buffers of shared memory, the source fills them in turn.

    target -> source   GrantBuffers(buffer_bytes), with the descriptors of the target's buffers
    source -> target   for each bucket: BucketReady(bucket, buffer, digest)
    target -> source   BufferFree(buffer): it may be filled again

While the target takes a bucket out of one buffer, the source fills the next.
"""

import socket
from collections.abc import Sequence

from relight.errors import ProtocolError, RestoreError
from relight.transfer.io.buffers import Buffer, close_buffers, create_buffers, open_buffers
from relight.transfer.io.channel import Channel
from relight.transfer.plan.plan import Bucket
from relight.transfer.plan.schedule import IPC_BUFFERS
from relight.transfer.restore.fabric import ENDED, MISMATCH, other_digest
from relight.transfer.restore.offer import BucketReady, BufferFree, GrantBuffers, ToSource, ToTarget
from relight.transfer.tensors.weights import TensorReader, TensorWriter

# Two IPC buffers, each in two halves: a source and a target of the same speed wait for each other less often.
BUFFERS = 2 * IPC_BUFFERS


class SpareBuffer:
    """The only buffer of copies that are made beside training, one after the other, and kept from one to the next.

    No step waits for such a copy, and finding memory for a bucket takes as long as moving three.
    """

    def __init__(self) -> None:
        self._buffer: Buffer | None = None

    def acquire(self, nbytes: int) -> Buffer:
        """A buffer of at least so many bytes. Raises TransferError if the machine has no memory for it."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and buffer.nbytes < nbytes:
            buffer.close()
            buffer = None
        return buffer or Buffer.create(nbytes)

    def leave(self, buffer: Buffer) -> None:
        """For the next copy. The source of this one must be done with it."""
        self._buffer = buffer


class SharedSource(Channel):
    """The source's end (`fabric.SourceEnd`)."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, ToSource)
        self._buffers: tuple[Buffer, ...] = ()
        self._sent = 0

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        lent = self.receive()
        if not isinstance(lent, GrantBuffers):
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
        self.send(BucketReady(bucket.index, number, digest))
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
        if not isinstance(self.receive(), BufferFree):
            raise ProtocolError("the target does not want the rest")


class SharedTarget(Channel):
    """The target's end (`fabric.TargetEnd`)."""

    def __init__(self, connection: socket.socket, spare: SpareBuffer | None = None) -> None:
        """`spare`: to be used instead of new buffers, for a copy that is made beside training."""
        super().__init__(connection, ToTarget)
        self._spare = spare
        self._buffers: tuple[Buffer, ...] = ()

    def establish(self, timeout_seconds: float) -> None:
        self.set_timeout(timeout_seconds)  # it is connected, and the kernel has named the source

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Make buffers, no more and no larger than these buckets need."""
        nbytes = max(bucket.nbytes for bucket in buckets)
        if self._spare is None:
            self._buffers = create_buffers(min(BUFFERS, len(buckets)), nbytes)
        else:
            self._buffers = (self._spare.acquire(nbytes),)
        self.send(GrantBuffers(self._buffers[0].nbytes), [buffer.descriptor for buffer in self._buffers])

    def receive_bucket(self, writer: TensorWriter, bucket: Bucket) -> int:
        filled = self.receive()
        if filled is None:
            raise RestoreError(ENDED)
        if not isinstance(filled, BucketReady) or filled.bucket != bucket.index:
            raise RestoreError(MISMATCH)
        if not 0 <= filled.buffer < len(self._buffers):
            raise RestoreError(MISMATCH)
        digest = writer.load(bucket, self._buffers[filled.buffer].view)
        if digest != filled.digest:
            raise RestoreError(other_digest(bucket))
        self.send(BufferFree(filled.buffer))
        return digest

    def finish(self) -> None:
        """The source was notified of each bucket, and writes no more."""
        if self._spare is not None and self._buffers:
            self._spare.leave(self._buffers[0])
            self._buffers = ()

    def close(self) -> None:
        super().close()
        close_buffers(self._buffers)
        self._buffers = ()
