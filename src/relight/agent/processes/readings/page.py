"""Reads what a worker stamped into shared memory, also after its death.

The mapping is a worker's part of a memfd: its position page, its phase trace, and two slots of rank-private state.
Worker and agent share no lock, and a worker may die (or scribble) anywhere, so every read is checked.

All workers of a host hold the same memfd, and map their own part. So what a dead one left is there for as long as the
agent or any other worker lives: should agent and worker die together, the agent's successor finds it in the others.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
import threading
from pathlib import Path

import xxhash

from relight.core.protocol.position import (
    BATCH_MARK,
    BATCH_MARK_OFFSET,
    INHERITED_MARK_OFFSET,
    LEAVE_OFFSET,
    LIFE_LOCK_OFFSET,
    MAPPING_BYTES,
    PAGE_BYTES,
    PRIVATE_HEADER,
    PRIVATE_OFFSET,
    PRIVATE_SLOT_BYTES,
    TRACE_INDEX_OFFSET,
    TRACE_OFFSET,
    TRACE_RECORD,
    TRACE_RECORDS,
    Position,
    decode_page,
)
from relight.wire.memory import lifelock

TraceRecord = tuple[int, int, int, int, int]
MAX_PRIVATE_BYTES = PRIVATE_SLOT_BYTES - PRIVATE_HEADER.size
_NO_VERSION = -1
_TOKEN_BYTES = 8
_WORD = struct.Struct("<q")


class Pages:
    """The memfd. Every process gets a part of its own, which no other one ever had."""

    def __init__(self, descriptor: int) -> None:
        """Own `descriptor` from here on."""
        self.descriptor = descriptor
        self.token = os.pread(descriptor, _TOKEN_BYTES, 0).hex()  # tells this memfd from all others

    @classmethod
    def create(cls) -> "Pages":
        """Create the memory, without a page yet. It cannot be cut short, so no worker can make its agent fault."""
        descriptor = os.memfd_create("relight-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, MAPPING_BYTES)  # in the place of the first one: the token
        os.pwrite(descriptor, secrets.token_bytes(_TOKEN_BYTES), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(descriptor)

    @classmethod
    def open(cls, path: str | Path) -> "Pages":
        """Open the pages that another agent created, through /proc/PID/fd."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def add(self) -> "Page":
        """A blank page."""
        offset = os.fstat(self.descriptor).st_size
        os.ftruncate(self.descriptor, offset + MAPPING_BYTES)
        return Page(self.descriptor, offset)

    def at(self, offset: int) -> "Page":
        """The page that begins there. Raises ValueError if none does."""
        return Page(self.descriptor, offset)

    def close(self) -> None:
        os.close(self.descriptor)


class Page:
    """One worker's shared mapping."""

    def __init__(self, descriptor: int, offset: int) -> None:
        """Map the page that begins at `offset` of a memfd. Raises ValueError if none does."""
        size = os.fstat(descriptor).st_size
        if offset <= 0 or offset % MAPPING_BYTES or offset + MAPPING_BYTES > size:
            raise ValueError(f"no position page begins at {offset} of {size} bytes")
        self.offset = offset
        self._traced = 0
        self._mapping = mmap.mmap(descriptor, MAPPING_BYTES, offset=offset)
        self._guard = threading.Lock()  # over the next two
        self._awaited = False  # a thread may be within the life lock, which is part of the mapping
        self._needed = True

    def position(self) -> Position:
        """The last stamp. Words that make no position read as a worker that has not stamped yet."""
        try:
            return decode_page(self._mapping[:PAGE_BYTES])
        except ValueError:
            return Position()

    def drain_trace(self) -> tuple[TraceRecord, ...]:
        """The records written since the last call, oldest first, as far as the ring still holds them."""
        written = self._trace_count()
        self._traced = min(self._traced, written)  # no writer of ours counts down
        first = max(self._traced, written - TRACE_RECORDS)
        records = [self._trace_record(index) for index in range(first, written)]
        # What the worker has overwritten meanwhile, or is overwriting now, is not what it was when it was new.
        overwritten = max(0, self._trace_count() - TRACE_RECORDS + 1 - first)
        self._traced = written
        return tuple(records[overwritten:])

    def read_private(self, version: int) -> bytes | None:
        """The rank-private state of `version`, or None unless all of it is there."""
        offset = _slot_offset(version)
        held, size, digest = PRIVATE_HEADER.unpack_from(self._mapping, offset)
        if held != version or not 0 <= size <= MAX_PRIVATE_BYTES:
            return None
        begin = offset + PRIVATE_HEADER.size
        payload = self._mapping[begin : begin + size]
        return payload if xxhash.xxh3_64_intdigest(payload) == digest else None

    def write_private(self, version: int, payload: bytes) -> None:
        """Put a version into its slot; a reader sees all of it or nothing."""
        if len(payload) > MAX_PRIVATE_BYTES:
            raise ValueError(f"rank-private state of {len(payload)} bytes is over {MAX_PRIVATE_BYTES}")
        offset = _slot_offset(version)
        begin = offset + PRIVATE_HEADER.size
        PRIVATE_HEADER.pack_into(self._mapping, offset, _NO_VERSION, 0, 0)
        self._mapping[begin : begin + len(payload)] = payload
        PRIVATE_HEADER.pack_into(self._mapping, offset, version, len(payload), xxhash.xxh3_64_intdigest(payload))

    def inherit(self, version: int, payload: bytes, mark: bytes) -> None:
        """Put here what a predecessor of this page's process left, and which batch it drew last.

        Not once the process has private state of its own: what comes late, or a second time, from another host must not
        overwrite what has come of it. Raises ValueError if `mark` is none.
        """
        if len(mark) != BATCH_MARK.size:
            raise ValueError(f"a batch's mark has {BATCH_MARK.size} bytes, not {len(mark)}")
        if max(self.position().private_versions) < 0:
            self._mapping[INHERITED_MARK_OFFSET : INHERITED_MARK_OFFSET + BATCH_MARK.size] = mark
            self.write_private(version, payload)

    def batch_mark(self) -> bytes:
        """Return the mark of the batch that this page's process drew last."""
        return self._mapping[BATCH_MARK_OFFSET : BATCH_MARK_OFFSET + BATCH_MARK.size]

    def ask_to_leave(self) -> None:
        """Have the worker end by itself, between two steps."""
        _WORD.pack_into(self._mapping, LEAVE_OFFSET, 1)

    def await_death(self) -> bool:
        """Block until the worker's main thread has ended; False if it never said that it lives, or after `clear`."""
        with self._guard:
            if not self._needed:
                return False
            self._awaited = True
        try:
            return lifelock.await_death(self._mapping, LIFE_LOCK_OFFSET)
        finally:
            with self._guard:
                self._awaited = False
                if not self._needed:
                    self._give_back()

    def close(self) -> None:
        self._mapping.close()

    def clear(self) -> None:
        """Give its memory back, and close it. The worker must be dead.

        A thread that still is in `await_death` does so itself when it is through: the C library would follow pointers
        in the lock that are no longer there.
        """
        with self._guard:
            self._needed = False
            if not self._awaited:
                self._give_back()

    def _give_back(self) -> None:
        with contextlib.suppress(OSError):  # a kernel without it: until the host's last process has ended
            self._mapping.madvise(mmap.MADV_REMOVE)
        self.close()

    def _trace_count(self) -> int:
        (count,) = _WORD.unpack_from(self._mapping, TRACE_INDEX_OFFSET)
        return max(0, int(count))

    def _trace_record(self, index: int) -> TraceRecord:
        offset = TRACE_OFFSET + index % TRACE_RECORDS * TRACE_RECORD.size
        stamp_ns, generation, step, phase, version = TRACE_RECORD.unpack_from(self._mapping, offset)
        return stamp_ns, generation, step, phase, version


def _slot_offset(version: int) -> int:
    return PRIVATE_OFFSET + version % 2 * PRIVATE_SLOT_BYTES
