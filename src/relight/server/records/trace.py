"""Files for people: phase changes (`trace.jsonl`) and other states (`status.jsonl`).

Each is bounded: two files, the older one dropped.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from relight.wire.messages import TraceChunk
from relight.wire.status import Status, StatusLine, decode_line

MAX_TRACE_BYTES = 64 * 2**20
MAX_STATUS_BYTES = 4 * 2**20


class Lines:
    """Appends JSON lines to NAME.jsonl. Never raises: the first failure goes to `on_failure`, and ends the file."""

    def __init__(self, path: Path, on_failure: Callable[[str], None], what_is_missed: str, max_bytes: int) -> None:
        self._path = path
        self._older = path.with_suffix(f".1{path.suffix}")
        self._on_failure = on_failure
        self._what_is_missed = what_is_missed
        self._max_bytes = max_bytes
        self._bytes = path.stat().st_size if path.exists() else 0  # of a controller before this one
        self._failed = False

    def append(self, line: msgspec.Struct) -> None:
        if self._failed:
            return
        text = msgspec.json.encode(line) + b"\n"
        try:
            if self._bytes + len(text) > self._max_bytes and self._bytes:
                os.replace(self._path, self._older)
                self._bytes = 0
            with self._path.open("ab", buffering=0) as file:
                file.write(text)
            self._bytes += len(text)
        except OSError as error:
            self._failed = True
            self._on_failure(
                f"{self._path} cannot be written ({error.strerror or error}); training goes on, {self._what_is_missed} "
                "from here on"
            )


class TraceFile:
    """The phases of each worker, for the timeline."""

    def __init__(self, run_dir: Path, on_failure: Callable[[str], None], max_bytes: int = MAX_TRACE_BYTES) -> None:
        self._lines = Lines(run_dir / "trace.jsonl", on_failure, "the timeline will miss the phases", max_bytes)

    def append(self, chunk: TraceChunk) -> None:
        if chunk.records:
            self._lines.append(chunk)


class StatusFile:
    """States that workers and agents report, besides phases."""

    def __init__(self, run_dir: Path, on_failure: Callable[[str], None]) -> None:
        missed = "what is published and restored is not shown"
        self._lines = Lines(run_dir / "status.jsonl", on_failure, missed, MAX_STATUS_BYTES)

    def append(self, now: float, status: Status) -> None:
        self._lines.append(StatusLine(now=round(now, 3), status=status))


def read_statuses(run_dir: Path) -> Iterator[Status]:
    """Yield the lines of the status files of a run, oldest first, without those that cannot be read. Never raises."""
    for name in ("status.1.jsonl", "status.jsonl"):
        try:
            with (run_dir / name).open("rb") as lines:
                for line in lines:
                    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                        yield decode_line(line).status
        except OSError:
            continue
