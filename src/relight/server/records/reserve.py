"""The little that must be known even if the journal's disk is full: a few bytes, allocated once and overwritten.

Overwriting needs no new room. Nothing is written here while the journal can be written, so it costs nothing then.
"""

import os
from pathlib import Path

_FORMAT = "generation {:012d} incomplete {:d}\n"


class Reserve:
    """`generation`: the newest one in use. `incomplete`: the journal misses something that happened."""

    def __init__(self, path: Path) -> None:
        """Read it, or make it. Raises OSError, also if it is damaged."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            text = os.pread(self._descriptor, 64, 0).decode(errors="replace").split()
            if text:
                try:
                    self.generation, self.incomplete = int(text[1]), text[3] != "0"
                except (ValueError, IndexError):
                    raise OSError(0, f"{path} is damaged") from None
            else:
                self.generation, self.incomplete = 0, False
                self._write()
        except OSError:
            os.close(self._descriptor)
            raise

    def keep(self, *, generation: int | None = None, incomplete: bool | None = None) -> None:
        """Write what has changed, and wait until it is on the disk. Raises OSError."""
        self.generation = self.generation if generation is None else generation
        self.incomplete = self.incomplete if incomplete is None else incomplete
        self._write()

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self) -> None:
        data = _FORMAT.format(self.generation, self.incomplete).encode()
        if os.pwrite(self._descriptor, data, 0) != len(data):
            raise OSError(0, "the reserve was written in part")
        os.fdatasync(self._descriptor)
