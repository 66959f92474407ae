"""Follows files that others append to. Whole lines only; what is not whole yet is read again next time."""

import os
from pathlib import Path

MAX_LINE_BYTES = 8 * 2**20  # twice the largest message: no line of ours is longer
READ_BYTES = 2**20


class Tail:
    """New lines of `path`. With `older`, `path` may be renamed to that name and begun anew, as trace.jsonl is."""

    def __init__(self, path: Path, older: Path | None = None, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._path = path
        self._older = older
        self._max_line_bytes = max_line_bytes
        self._descriptor: int | None = None
        self._offset = 0  # of what has been given out: always after a newline
        self.too_long = 0  # lines that were left out

    def read(self, max_bytes: int = READ_BYTES) -> list[bytes]:
        """Some more whole lines, oldest first; an empty list if there is nothing new. Never raises OSError."""
        try:
            if self._descriptor is None and not self._open():
                return []
            lines = self._read(max_bytes)
            return lines or (self._read(max_bytes) if self._turn() else [])
        except OSError:  # the directory was moved away, or its disk is in trouble: it may come back
            self.close()
            return []

    def skip_to_last(self, last_bytes: int) -> int:
        """Skip all but the last so many bytes, before anything is read. Returns how many bytes are left."""
        try:
            if self._descriptor is None and not self._open():
                return 0
            assert self._descriptor is not None
            size = os.fstat(self._descriptor).st_size
            if size > last_bytes:  # begin with a whole line
                begin = size - last_bytes - 1
                data = os.pread(self._descriptor, min(last_bytes + 1, self._max_line_bytes), begin)
                self._offset = begin + data.find(b"\n") + 1
            return size - self._offset
        except OSError:
            self.close()
            return 0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> bool:
        """The older file first, if nothing has been read so far."""
        for path in (self._older, self._path):
            if path is None or (path == self._older and self._offset):
                continue
            try:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                return True
            except FileNotFoundError:
                continue
        return False

    def _read(self, max_bytes: int) -> list[bytes]:
        assert self._descriptor is not None
        data = os.pread(self._descriptor, max_bytes, self._offset)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == max_bytes:
            data = os.pread(self._descriptor, self._max_line_bytes, self._offset)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == self._max_line_bytes:  # it continues: the rest counts as another line
                self.too_long += 1
                self._offset += len(data)
                return []
        self._offset += end
        return data[:end].splitlines()

    def _turn(self) -> bool:
        """At the end of a file that has been renamed: continue with the new one of its name."""
        assert self._descriptor is not None
        here, named = os.fstat(self._descriptor), _identity(self._path)
        if named is None or named == (here.st_dev, here.st_ino):
            return False
        if os.pread(self._descriptor, 1, self._offset):  # half a line may still become whole
            return False
        self.close()
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset = 0
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
