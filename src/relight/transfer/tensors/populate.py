"""Find memory for a large mapping in the background, before it is written: a page fault for each part costs more.

Parts are taken in the order of their addresses by several threads, so that what is written first is there first.
"""

import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it, and holds the interpreter's lock meanwhile
_STEP_BYTES = 8 * 2**20  # populated at a time: other threads of this process may have page faults to wait for
_THREADS = 4
_RESERVED_SHARE = 4  # of the memory of the machine, or of the control group: a quarter stays free
_NICENESS = 10
_libc = ctypes.CDLL(None)


def populate(owner: object, memory: memoryview, *, after: Sequence[threading.Thread] = ()) -> list[threading.Thread]:
    """Populate `memory` (writable, private) as long as `owner` is alive; return the threads that do so.

    No byte changes, and the memory may be written meanwhile. Before Linux 5.14 nothing happens.
    `after`: wait for these threads first, then proceed at a low priority, and stop while a quarter of the memory of the
    machine is still available: for memory that is not needed yet.
    """
    kept = weakref.ref(owner)
    starts = range(0, len(memory), _STEP_BYTES)
    taken = itertools.count()  # threads may share it: its `next` is atomic
    count = 1 if after else min(_THREADS, len(os.sched_getaffinity(0)))

    def work() -> None:
        if after:
            for thread in after:
                thread.join()
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (index := next(taken)) < len(starts) and kept() is not None:
            if after and not is_memory_plentiful(len(memory) - starts[index]):
                return
            if not _populate_range(memory, starts[index]):
                return

    threads = [threading.Thread(target=work, name="relight-populate", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def _populate_range(memory: memoryview, start: int) -> bool:
    """Return False if the kernel does not offer this, or has no memory: a later write will report that."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start
    count = min(_STEP_BYTES, len(memory) - start)
    return not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(count), _MADV_POPULATE_WRITE)


def is_memory_plentiful(nbytes: int, read: Callable[[str], str] | None = None) -> bool:
    """Return whether `nbytes` more leave a quarter of the memory available, here and in the control group.

    `read(path)` returns the text of a file below /proc or /sys; it raises OSError for one that is not there.
    """
    read = read or (lambda path: Path(path).read_text())
    try:
        fields = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError, IndexError):
        return False
    limits = [(total, available), *_group_limits(read)]
    return all(nbytes + limit // _RESERVED_SHARE <= free for limit, free in limits)


def _group_limits(read: Callable[[str], str]) -> list[tuple[int, int]]:
    """Limit and rest, in bytes, of this process's control group (version 2) and those that it is in."""
    try:
        group = next(line[3:] for line in read("/proc/self/cgroup").splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    found = []
    parts = [part for part in group.split("/") if part]
    for depth in range(len(parts) + 1):
        folder = "/".join(["/sys/fs/cgroup", *parts[:depth]])
        with contextlib.suppress(OSError, ValueError):  # no limit ("max") is no number
            limit = int(read(f"{folder}/memory.max"))
            found.append((limit, limit - int(read(f"{folder}/memory.current"))))
    return found
