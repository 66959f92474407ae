"""The IPC buffers on a host: anonymous shared memory, passed on as descriptors, gone with the last process.

No file in /dev/shm, so nothing remains however a process ends. The size is sealed: no process can make another
fault on a missing byte. Pages are reserved when the buffer is made, so that a machine without memory says so
then, not in the middle of an update.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence

from relight.device.pinning import pin
from relight.errors import TransferError
from relight.transfer.plan.manifest import describe_bytes


class Buffer:
    """One mapping of one shared buffer."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map `descriptor`, and own it from here on. Raises TransferError if it is not such a buffer."""
        self.descriptor = descriptor
        self.nbytes = nbytes
        try:
            size = os.fstat(descriptor).st_size
            if size < nbytes:
                raise ValueError(f"it has {size} bytes, not {nbytes} as announced")
            # All pages now: a fault for each one, in the middle of the first bucket, costs several times as much.
            self._mapping = mmap.mmap(descriptor, max(nbytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise TransferError(f"the shared buffer cannot be mapped: {error}") from error
        self.view = memoryview(self._mapping)
        self._unpin = pin(self.view)

    @classmethod
    def create(cls, nbytes: int) -> "Buffer":
        """A new one. Raises TransferError if the machine has no memory for it."""
        try:
            descriptor = os.memfd_create("relight-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise TransferError(f"no shared buffer of {describe_bytes(nbytes)}: {error.strerror}") from error
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(descriptor)
            what = "there is not enough memory" if error.errno in _FULL else str(error.strerror)
            raise TransferError(
                f"no shared buffer of {describe_bytes(nbytes)}: {what}; choose a smaller bucket_bytes"
            ) from error
        return cls(descriptor, nbytes)

    def close(self) -> None:
        """Unmap it here. Views of it that are still held keep the mapping until they are gone."""
        self._unpin()
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapping.close()
        os.close(self.descriptor)


_FULL = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})


def create_buffers(count: int, nbytes: int) -> tuple[Buffer, ...]:
    """`count` of them, or none."""
    made: list[Buffer] = []
    try:
        for _ in range(count):
            made.append(Buffer.create(nbytes))
    except TransferError:
        close_buffers(made)
        raise
    return tuple(made)


def open_buffers(descriptors: Sequence[int], nbytes: int) -> tuple[Buffer, ...]:
    """Map all that were received; closes every one if one is wrong."""
    made: list[Buffer] = []
    for position, descriptor in enumerate(descriptors):
        try:
            made.append(Buffer(descriptor, nbytes))
        except TransferError:
            close_buffers(made)
            for rest in descriptors[position + 1 :]:
                os.close(rest)
            raise
    return tuple(made)


def close_buffers(buffers: Iterable[Buffer]) -> None:
    for buffer in buffers:
        buffer.close()
