"""Keeps a Job up to date with the files of its run directory."""

import asyncio
import time
from pathlib import Path

import msgspec

from relight.dashboard.job import Job
from relight.dashboard.memory import Memory
from relight.dashboard.tail import Tail
from relight.dashboard.view import ranks, topics
from relight.timeline.spans import Chunk

MAX_LINES_AT_ONCE = 200  # of the trace, before somebody else may have the processor
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
        behind = False
        while lines := self._journal.read():
            for line in lines:
                self.job.take_journal(line)
            await asyncio.sleep(0)
        if lines := self._trace.read():
            behind = True
            for begin in range(0, len(lines), MAX_LINES_AT_ONCE):
                for line in lines[begin : begin + MAX_LINES_AT_ONCE]:
                    self._take_chunk(line)
                await asyncio.sleep(0)
        self.is_behind = behind

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
