"""Leftovers of multiprocessing's processes, and where they are: in the job's private directory, or named after it.

A worker ends by `os._exit`, or is killed, so what Python does at an orderly exit is left undone. A process that removes
the private directory removes all of it.
"""

import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import signal
import threading
from pathlib import Path

_MOST_PATH_BYTES = 80  # sockets are made in it, with names of up to 18 bytes; the kernel takes 107


def keep_together(private_dir: Path, process: str) -> None:
    """From now on, what this process and its children make for multiprocessing is in, or named after, `private_dir`."""
    settings = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    if Path("/dev/shm").is_dir():
        settings["semprefix"] = f"/{private_dir.name}-{process}"
    directory = private_dir / f"mp-{process}"
    if len(os.fsencode(directory)) > _MOST_PATH_BYTES or "tempdir" in settings:
        return
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return
    settings["tempdir"] = str(directory)


def expect_ends_of_children() -> None:
    """From now on children may be killed: torch's DataLoader takes it for an error, and raises it anywhere."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_children() -> None:
    """Kill data loading processes (an ordinary exit of the interpreter would end them too), and drop semaphores."""
    expect_ends_of_children()
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
    for finalizer in list(multiprocessing.util._finalizer_registry.values()):  # type: ignore[attr-defined]
        if getattr(getattr(finalizer, "_callback", None), "__qualname__", "") == "SemLock._cleanup":
            finalizer()
