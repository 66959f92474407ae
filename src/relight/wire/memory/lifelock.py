"""A lock in shared memory that tells of its owner's death at once, before the kernel has torn down its memory.

A pidfd becomes readable only after the dying process's memory has been freed, which takes tens of milliseconds for a
gigabyte and seconds for a hundred. A robust mutex (pthread_mutexattr_setrobust) is released at the very start of the
exit: a waiting process gets EOWNERDEAD. The worker's main thread holds one from start to end; its agent waits.
"""

import ctypes
import errno
import mmap

LIFE_LOCK_BYTES = 64  # pthread_mutex_t is 40 bytes on x86-64 and 48 on 64-bit Arm
_PROCESS_SHARED = 1
_ROBUST = 1
_libc = ctypes.CDLL(None)
_held: list[mmap.mmap] = []  # the thread's list of robust locks points into them: they must never be unmapped


def hold(mapping: mmap.mmap, offset: int) -> None:
    """Make the lock and take it, for this thread's whole life. Raises OSError if the platform has no such lock."""
    _held.append(mapping)
    address = _address(mapping, offset)
    attributes = ctypes.create_string_buffer(LIFE_LOCK_BYTES)
    _check(_libc.pthread_mutexattr_init(attributes))
    _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
    _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
    _check(_libc.pthread_mutex_init(address, attributes))
    _check(_libc.pthread_mutex_lock(address))


def await_death(mapping: mmap.mmap, offset: int) -> bool:
    """Block until the thread that holds the lock has ended. False if there is no such lock. Releases the GIL."""
    address = _address(mapping, offset)
    status = _libc.pthread_mutex_lock(address)
    if status == errno.EOWNERDEAD:
        _libc.pthread_mutex_consistent(address)
    if status in (0, errno.EOWNERDEAD):
        _libc.pthread_mutex_unlock(address)
    return bool(status == errno.EOWNERDEAD)


def _address(mapping: mmap.mmap, offset: int) -> ctypes.c_void_p:
    """The address of the lock. The mapping must not be closed while a thread holds it or waits for it."""
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapping, offset)))


def _check(status: int) -> None:
    if status:
        raise OSError(status, "no robust lock in shared memory")
