"""Names in shared memory that a job has left, and not those that others on the machine make meanwhile.

A name counts if it is named after a private directory that the job has made, or after one of the job's processes.
"""

import ctypes
import os
import re
import struct
from collections.abc import Collection
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_IN_CREATE = 0x100
_EVENT = struct.Struct("iIII")  # inotify's: watch, mask, cookie, length of the name that follows
_AFTER_A_DIRECTORY = re.compile(r"(?:sem\.)?(relight-[^-]+)-")  # training/process/leftovers.py
_AFTER_A_PROCESS = re.compile(r"torch_(\d+)_|cuda\.shm\.\d+\.([0-9a-f]+)\.")  # device/leftovers.py


class Made:
    """Names of all that is made in a directory, also of what is gone again: the kernel keeps the events."""

    def __init__(self, directory: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._names: set[str] = set()
        if self._descriptor < 0 or libc.inotify_add_watch(self._descriptor, os.fsencode(directory), _IN_CREATE) < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {directory}")

    def names(self) -> frozenset[str]:
        """Names since this object was made."""
        while True:
            try:
                events = os.read(self._descriptor, 2**16)
            except BlockingIOError:
                return frozenset(self._names)
            while events:
                *_, length = _EVENT.unpack_from(events)
                self._names.add(os.fsdecode(events[_EVENT.size :][:length].rstrip(b"\0")))
                events = events[_EVENT.size + length :]

    def close(self) -> None:
        os.close(self._descriptor)


def in_shared_memory() -> frozenset[str]:
    """All names there are, of this job and of others."""
    return frozenset(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else frozenset()


def named_after(names: Collection[str], directories: Collection[str], pids: Collection[int]) -> list[str]:
    """Those of `names` that contain the name of one of these private directories, or the pid of a process."""

    def is_theirs(name: str) -> bool:
        if directory := _AFTER_A_DIRECTORY.match(name):
            return directory[1] in directories
        process = _AFTER_A_PROCESS.match(name)
        return process is not None and (int(process[1]) if process[1] else int(process[2], 16)) in pids

    return sorted(filter(is_theirs, names))
