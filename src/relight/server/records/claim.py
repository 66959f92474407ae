"""A run directory belongs to one `relight run` at a time: two that are started at the same moment must not mix."""

import contextlib
import fcntl
import os
from pathlib import Path

from relight.errors import UsageError

LOCK = "run.lock"


def remove_unused(run_dir: Path) -> None:
    """Remove a claimed directory in which nothing of a run was written."""
    with contextlib.suppress(OSError):
        if [path.name for path in run_dir.iterdir()] == [LOCK]:
            (run_dir / LOCK).unlink()
        run_dir.rmdir()


class Claim:
    """Held until the process ends, however it ends; the kernel then lets go of it.

    A lock on a file, not on the directory: that is what a publisher in this directory locks while it takes its place.
    """

    def __init__(self, run_dir: Path) -> None:
        """Claim an existing directory. Raises UsageError if another process has claimed it, OSError if it is gone.

        A file system that cannot lock is left to the journal, which only one controller can make.
        """
        self._path = run_dir / LOCK
        while True:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._descriptor)
                raise UsageError(
                    f"--run-dir {run_dir} is in use by another `relight run`, which was started before this one and "
                    "has not ended; wait for its end, or choose another directory"
                ) from None
            except OSError:
                return
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                    return
            # The process that had claimed it has removed it in the meantime: nothing of a run was in it.
            os.close(self._descriptor)
            run_dir.mkdir(parents=True, exist_ok=True)
