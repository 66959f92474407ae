"""Shared memory of one process that others of its host read: weights that are lent where they lie.

Without a name, like the buffers, and gone with the last process that has it. Only the process that has made it can
write there: the system refuses everybody else (F_SEAL_FUTURE_WRITE).
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref

from relight.errors import TransferError
from relight.transfer.plan.manifest import describe_bytes

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise(2), Linux 5.14; Python's mmap has no name for them
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1
_FIXED_NOREPLACE, _NORESERVE = 0x100000, 0x4000  # of mmap(2)
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


class LentMemory:
    """Memory that this process writes, and others map by its descriptor.

    A process that is forked of this one has nothing there: it would see later writes, and not a copy as of all other
    memory. If it reads the weights, it ends (SIGSEGV).
    """

    def __init__(self, nbytes: int) -> None:
        """Raises TransferError: the system has no memory for it, or is too old."""
        self.nbytes = nbytes
        try:
            self.descriptor = os.memfd_create("relight-lent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise TransferError(f"no shared memory of {describe_bytes(nbytes)}: {error.strerror}") from error
        weakref.finalize(self, os.close, self.descriptor)
        try:
            os.ftruncate(self.descriptor, nbytes)
            mapping = mmap.mmap(self.descriptor, nbytes)  # kept by what lies in it
            mapping.madvise(mmap.MADV_HUGEPAGE)
            mapping.madvise(mmap.MADV_DONTFORK)
            self.view = memoryview(mapping)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
            if _libc.madvise(self.address, nbytes, _POPULATE_WRITE):  # now, and not by a SIGBUS later
                raise OSError(ctypes.get_errno(), "")
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except (OSError, ValueError, OverflowError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise TransferError(f"no shared memory of {describe_bytes(nbytes)}: {reason}") from error
        _lent.add(self)

    def reserve(self) -> None:
        """Keep the addresses reserved in a forked process: freed tensors would unmap whatever came to lie there."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE | _NORESERVE
        _libc.mmap(self.address, self.nbytes, _PROT_NONE, flags, -1, 0)


_lent: "weakref.WeakSet[LentMemory]" = weakref.WeakSet()


def _reserve_all() -> None:
    for memory in list(_lent):
        memory.reserve()


os.register_at_fork(after_in_child=_reserve_all)


class BorrowedMemory:
    """Memory of another process, mapped here to be read."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map `descriptor`, and own it from here on. Raises TransferError if it cannot be."""
        try:
            found = os.fstat(descriptor)
            if found.st_size < nbytes or nbytes < 1:
                raise TransferError(f"lent memory has {found.st_size} bytes, not {nbytes} as announced")
            self.nbytes = nbytes
            self.number = found.st_ino  # no other file has it while this one is mapped
            address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
            if address in (None, _FAILED):
                reason = os.strerror(ctypes.get_errno() or errno.ENOMEM)
                raise TransferError(f"lent memory of {describe_bytes(nbytes)} cannot be mapped: {reason}")
        finally:
            os.close(descriptor)
        self._unmap = weakref.finalize(self, _libc.munmap, address, nbytes)
        for advice in (mmap.MADV_HUGEPAGE, _POPULATE_READ):  # now, and not in the middle of the first bucket
            _libc.madvise(address, nbytes, advice)
        self.view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    def close(self) -> None:
        """Unmap it. Nothing may read it any more."""
        with contextlib.suppress(BufferError):
            self.view.release()
        self._unmap()


def number_of(descriptor: int) -> int:
    """Return the number of the memory that a descriptor stands for."""
    return os.fstat(descriptor).st_ino
