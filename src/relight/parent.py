"""Ends a process when its parent dies; controller and agent then tidy up for the launcher."""

import contextlib
import ctypes
import os
import shutil
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SHARED_MEMORY = Path("/dev/shm")
_ATTEMPTS = 10  # another process may be removing, or still writing, at the same moment


def end_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent process dies. Exits at once if `parent` is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if is_orphan(parent):
        raise SystemExit("relight: the process that started this one is gone")


def outlive_parent() -> None:
    """Ask the kernel for no signal any more, so that the end of this process is not cut off.

    A parent with threads is told of more than once: its children become another thread's when one of its threads ends.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0)


def is_orphan(parent: int) -> bool:
    """Return whether the process `parent`, which started this one, is gone. 0: there is none to watch."""
    return parent != 0 and os.getppid() != parent


def is_dying(parent: int) -> bool:
    """Return whether `parent` is gone, or all but gone: the kernel tells its children when its first thread ends.

    Until the last thread has ended too, they are still its children.
    """
    if parent == 0 or is_orphan(parent):
        return parent != 0
    try:
        state = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state in ("Z", "X")


def tidy_up_for(parent: int, private_dir: Path) -> None:
    """Remove the job's private directory if `parent`, which would have done it, is gone or all but gone.

    Controller and agent both do so at their end, so that the last of them leaves nothing. They may end before the last
    thread of a killed parent has.
    """
    if not is_dying(parent):
        return
    for _ in range(_ATTEMPTS):
        remove_private_dir(private_dir)
        if not private_dir.exists():
            return


def remove_private_dir(private_dir: Path) -> None:
    """Remove the directory, and semaphores that workers of the job or their processes had no time to remove.

    Workers name theirs after the directory (`relight.training.process.leftovers`).
    """
    for semaphore in _SHARED_MEMORY.glob(f"sem.{private_dir.name}-*"):
        with contextlib.suppress(OSError):
            semaphore.unlink()
    shutil.rmtree(private_dir, ignore_errors=True)
