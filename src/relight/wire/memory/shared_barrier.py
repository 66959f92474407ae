"""Shared memory in which the ranks of one host post a few numbers that all of them can read.

The agent creates the memory and its workers inherit it. Each entry has one writer at a time, and a checksum tells a
reader whether it has read a complete row, so there is no lock that a dying process could hold. A row outlives the
process that posted it, as data sent through a socket would.

A waiting process sleeps in futex(2) on one word, the futex word; a process that posts changes the word and wakes all.
"""

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import platform
import secrets
import struct
from collections.abc import Sequence

import xxhash

MAX_RANKS = 64  # of one host: each rank reads every entry
MAX_NUMBERS = 12  # as many as an entry has room for

_HEADER = struct.Struct("<q")  # the token
_FUTEX_WORD_OFFSET = 64  # in a cache line of its own
_ENTRIES_OFFSET = 128
_ENTRY_BYTES = 128
_ROW = struct.Struct(f"<qqq{MAX_NUMBERS}q")  # generation, round, how many, the numbers
_ROWS = [struct.Struct(f"<qqq{count}q{8 * (MAX_NUMBERS - count)}x") for count in range(MAX_NUMBERS + 1)]  # the same
_CHECKSUM = struct.Struct("<Q")
# A rank may post for the next round while another has still to read this one, but not for the one after.
_ROUNDS = 2
# A process of an older generation may still post when it comes back to life; its agent kills it long before this many
# generations have gone by.
_GENERATIONS = 8
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # number of the system call
_ALL = 2**31 - 1
_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedBarrier:
    """Maps the memory into one process."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        """Map `descriptor`, made for so many ranks. Raises ValueError if it is something else, OSError."""
        size = _mapping_bytes(ranks)
        if os.fstat(descriptor).st_size != size:
            raise ValueError(f"a shared barrier for {ranks} ranks has {size} bytes, not {os.fstat(descriptor).st_size}")
        if _FUTEX is None:
            raise OSError(f"the number of futex(2) on {platform.machine()} is not known here")
        self.ranks = ranks
        self._map = mmap.mmap(descriptor, size)
        self._futex_word = memoryview(self._map)[_FUTEX_WORD_OFFSET : _FUTEX_WORD_OFFSET + 4].cast("I")
        self._address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._map, _FUTEX_WORD_OFFSET)))
        self._wakes = itertools.count(secrets.randbits(32))
        (self.token,) = _HEADER.unpack_from(self._map)  # identifies this memory

    @staticmethod
    def create(ranks: int) -> int:
        """Create empty memory that cannot be resized; return its descriptor. Raises OSError."""
        descriptor = os.memfd_create("relight-shared-barrier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            os.ftruncate(descriptor, _mapping_bytes(ranks))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            os.pwrite(descriptor, _HEADER.pack(1 + secrets.randbelow(2**62)), 0)
            undo.pop_all()
        return descriptor

    def post(self, rank: int, generation: int, number: int, row: Sequence[int]) -> None:
        """Post `row` (at most MAX_NUMBERS) for `rank` in round `number` of a generation, and wake all waiters."""
        packed = _ROWS[len(row)].pack(generation, number, len(row), *row)
        offset = self._offset(rank, generation, number)
        self._map[offset : offset + _ROW.size] = packed
        _CHECKSUM.pack_into(self._map, offset + _ROW.size, xxhash.xxh3_64_intdigest(packed))
        self.wake(rank)

    def row(self, rank: int, generation: int, number: int) -> tuple[int, ...] | None:
        """Return the row that `rank` posted in that round; None if it has not yet."""
        offset = self._offset(rank, generation, number)
        packed = self._map[offset : offset + _ROW.size]
        found_generation, found_number, count, *numbers = _ROW.unpack(packed)
        if (found_generation, found_number) != (generation, number):
            return None
        if _CHECKSUM.unpack_from(self._map, offset + _ROW.size) != (xxhash.xxh3_64_intdigest(packed),):
            return None
        return tuple(numbers[:count])

    @property
    def futex_word(self) -> int:
        """The word to read before looking at rows and to pass to `sleep`, which then misses no row."""
        return self._futex_word[0]

    def wake(self, rank: int) -> None:
        """Wake all waiters. `rank` is the caller's: two simultaneous callers must not write the same word."""
        self._futex_word[0] = (next(self._wakes) * self.ranks + rank) % 2**32
        _libc.syscall(_FUTEX, self._address, _FUTEX_WAKE, _ALL)

    def sleep(self, futex_word: int, seconds: float) -> None:
        """Wait until the word differs from `futex_word`, or `seconds` have passed. Releases the GIL."""
        limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _libc.syscall(_FUTEX, self._address, _FUTEX_WAIT, ctypes.c_uint32(futex_word), ctypes.byref(limit), None, 0)

    def _offset(self, rank: int, generation: int, number: int) -> int:
        entry = (generation % _GENERATIONS * self.ranks + rank) * _ROUNDS + number % _ROUNDS
        return _ENTRIES_OFFSET + entry * _ENTRY_BYTES


def _mapping_bytes(ranks: int) -> int:
    return _ENTRIES_OFFSET + _GENERATIONS * ranks * _ROUNDS * _ENTRY_BYTES
