"""The phase trace on disk: what each worker did when, for the timeline. Bounded: two files, the older one dropped."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from relight.wire.messages import TraceChunk

MAX_TRACE_BYTES = 64 * 2**20


class TraceFile:
    """Appends chunks as JSON lines. Never raises: `on_failure` is told once, and the trace ends there."""

    def __init__(self, run_dir: Path, on_failure: Callable[[str], None], max_bytes: int = MAX_TRACE_BYTES) -> None:
        self._path = run_dir / "trace.jsonl"
        self._older = run_dir / "trace.1.jsonl"
        self._on_failure = on_failure
        self._max_bytes = max_bytes
        self._bytes = 0
        self._failed = False

    def append(self, chunk: TraceChunk) -> None:
        if self._failed or not chunk.records:
            return
        line = msgspec.json.encode(chunk) + b"\n"
        try:
            if self._bytes + len(line) > self._max_bytes and self._bytes:
                os.replace(self._path, self._older)
                self._bytes = 0
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
            self._bytes += len(line)
        except OSError as error:
            self._failed = True
            self._on_failure(
                f"the trace {self._path} cannot be written ({error.strerror or error}); training goes on, the "
                "timeline will miss the phases from here on"
            )
