"""Names in shared memory that a process leaves when it is killed, or ends by `os._exit` as workers do.

A worker that lends its GPU's memory to engines has two kinds: a count of those who use it (torch's), and a segment of
the CUDA driver's own. Nothing else removes them.
"""

import contextlib
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_names_of(pid: int, directory: Path = SHARED_MEMORY) -> None:
    """Remove the names of a process that has ended and is not collected yet: no other process has its number."""
    for pattern in (f"torch_{pid}_*", f"cuda.shm.{os.getuid()}.{pid:x}.*"):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()
