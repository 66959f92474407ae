"""Keeps a Job up to date with the files of its run directory."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from relight.dashboard.job import Job
from relight.dashboard.memory import Memory
from relight.dashboard.tail import Tail
from relight.dashboard.view import ranks, topics
from relight.timeline.spans import Chunk

SLICE_SECONDS = 0.01
MEMORY_SECONDS = 2.0


class Follower:
    """Reads what is new. Its pace is the caller's."""

    def __init__(self, run_dir: Path) -> None:
        self.job = Job()
        self._journal = Tail(run_dir / "journal.jsonl")
        self._trace = Tail(run_dir / "trace.jsonl", run_dir / "trace.1.jsonl")
        self._decode = msgspec.json.Decoder(Chunk).decode
        self._memory = Memory()
        self._rss_bytes: dict[str, int] = {}
        self._looked = 0.0
        self.is_behind = True  # there is more in the files than has been read

    async def read(self) -> None:
        """Take in what is new, the journal first: it says whose phases the trace tells of."""
        while lines := self._journal.read():
            await self._take(lines, self.job.take_journal)
        lines = self._trace.read()
        self.is_behind = bool(lines)
        await self._take(lines, self._take_chunk)

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

    def values(self) -> tuple[dict[str, object], dict[int, object], int, int]:
        """Topics, ranks, now and until when it is known what each rank did (ns since the job's start)."""
        job, now = self.job, time.monotonic()
        now_ns = job.now_ns(time.time_ns())
        if job.ended is None and now - self._looked >= MEMORY_SECONDS:
            self._looked = now
            self._rss_bytes = self._memory.rss_bytes({p.name: p.pid for p in job.processes().values()})
        return topics(job, now_ns), ranks(job, self._rss_bytes), now_ns, job.known_ns(now_ns)

    def close(self) -> None:
        self._journal.close()
        self._trace.close()
