"""Reads `trace.jsonl`, line by line: it may be large, still growing, or cut short by a crash."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from relight.core.protocol.position import Phase
from relight.timeline.model.spans import Chunk

NAMES = ("trace.1.jsonl", "trace.jsonl")  # the older part first
MAX_LINE_BYTES = 8 * 2**20  # twice the largest message: no line of ours is longer


class TraceReader:
    """Iterates over the chunks of a run's trace, any number of times; counts the lines it cannot read."""

    def __init__(self, run_dir: Path, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.paths = tuple(path for name in NAMES if (path := run_dir / name).is_file())
        self.unreadable_lines = 0
        self._max_line_bytes = max_line_bytes

    def __iter__(self) -> Iterator[Chunk]:
        self.unreadable_lines = 0
        decoder = msgspec.json.Decoder(Chunk)
        for path in self.paths:
            for line in self._lines(path):
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self.unreadable_lines += 1

    def _lines(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            while line := file.readline(self._max_line_bytes):
                if not line.endswith(b"\n") and len(line) == self._max_line_bytes:
                    self.unreadable_lines += 1
                    while line and not line.endswith(b"\n"):
                        line = file.readline(self._max_line_bytes)
                elif line.strip():
                    yield line


def first_stamp_ns(chunks: Iterable[Chunk]) -> int:
    """Wall-clock time of the first record, or 0: the origin of a trace without a report."""
    for chunk in chunks:
        if chunk.records:
            return chunk.records[0][0] + chunk.clock_offset_ns
    return 0


def latest_finished_step(chunks: Iterable[Chunk]) -> int | None:
    """The newest step whose optimizer was left again, or None."""
    steps = (
        before[2]
        for chunk in chunks
        for before, after in pairwise(chunk.records)
        if before[3] == Phase.OPTIMIZER and after[4] > before[4]
    )
    return max(steps, default=None)
