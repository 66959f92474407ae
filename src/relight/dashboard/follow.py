"""Keeps a Job up to date with the files of its run directory."""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from relight.dashboard.job import Job
from relight.dashboard.memory import Memory
from relight.dashboard.metrics import exposition
from relight.dashboard.tail import Tail
from relight.dashboard.view import ranks, topics
from relight.timeline.spans import Chunk
from relight.wire.status import decode_line

SLICE_SECONDS = 0.01
MEMORY_SECONDS = 2.0


class Follower:
    """Reads what is new. Its pace is the caller's."""

    def __init__(self, run_dir: Path) -> None:
        self.job = Job()
        self._journal = Tail(run_dir / "journal.jsonl")
        self._trace = Tail(run_dir / "trace.jsonl", run_dir / "trace.1.jsonl")
        self._status = Tail(run_dir / "status.jsonl", run_dir / "status.1.jsonl")
        self._decode = msgspec.json.Decoder(Chunk).decode
        self._memory = Memory()
        self._rss_bytes: dict[str, int] = {}
        self._looked = 0.0
        self.is_behind = True  # there is more in the files than has been read
        self.has_caught_up = False  # everything that was there at the start has been read
        self._path = run_dir / "journal.jsonl"

    async def read(self) -> None:
        """Take in what is new, the journal first: it says whose phases the trace tells of."""
        while lines := self._journal.read():
            await self._take(lines, self.job.take_journal)
        await self._take(self._status.read(), self._take_status)
        lines = self._trace.read()
        self.is_behind = bool(lines)
        await self._take(lines, self._take_chunk)
        self.has_caught_up |= not self.is_behind

    async def _take(self, lines: list[bytes], take: Callable[[bytes], None]) -> None:
        since = time.monotonic()
        for line in lines:
            take(line)
            if time.monotonic() - since > SLICE_SECONDS:  # pages wait, and perhaps somebody wants us to end
                await asyncio.sleep(0)
                since = time.monotonic()

    def _take_chunk(self, line: bytes) -> None:
        try:
            self.job.take_chunk(self._decode(line), time.time_ns())
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.job.unreadable_lines += 1

    def _take_status(self, line: bytes) -> None:
        try:
            self.job.take_status(decode_line(line).status)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.job.unreadable_lines += 1

    def values(self) -> tuple[dict[str, object], dict[int, object], int, int]:
        """Topics, ranks, now and until when it is known what each rank did (ns since the job's start)."""
        job = self.job
        now_ns = job.now_ns(time.time_ns())
        return topics(job, now_ns), ranks(job, self._memory_now()), now_ns, job.known_ns(now_ns)

    def metrics(self) -> str:
        """The job's numbers for Prometheus."""
        return exposition(self.job, self.job.now_ns(time.time_ns()), self._silent_seconds(), self._memory_now())

    def _memory_now(self) -> dict[str, int]:
        job, now = self.job, time.monotonic()
        if job.ended is None and now - self._looked >= MEMORY_SECONDS:
            self._looked = now
            self._rss_bytes = self._memory.rss_bytes({p.name: p.pid for p in job.processes().values()})
        return self._rss_bytes

    def _silent_seconds(self) -> float:
        """Since the controller last touched its journal."""
        try:
            return max(0.0, time.time() - self._path.stat().st_mtime)
        except OSError:
            return math.inf

    def close(self) -> None:
        self._journal.close()
        self._trace.close()
        self._status.close()
