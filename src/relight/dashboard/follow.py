"""Keeps a Job up to date with the files of its run directory.

The end of a long trace is read first, so that the page shows the present at once. All of it is then read again
from its beginning, in slices beside the rest; that pass takes over once it has caught up.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path

from relight.dashboard.model.job import Job, take_status, take_trace
from relight.dashboard.model.metrics import exposition
from relight.dashboard.model.phases import Phases
from relight.dashboard.model.view import is_silent, ranks, topics
from relight.dashboard.sources.memory import Memory
from relight.dashboard.sources.tail import Tail

SLICE_SECONDS = 0.01
SLICE_BYTES = 2**18  # of the older past, between two looks at what is new
MEMORY_SECONDS = 2.0
NEWEST_BYTES = 2**20  # of the end of a trace that is read first; and
NEWEST_BYTES_PER_RANK = 1024


class Follower:
    """Reads what is new. Its pace is the caller's."""

    def __init__(self, run_dir: Path) -> None:
        self.job = Job()
        self._journal_path = run_dir / "journal.jsonl"
        self._trace_paths = run_dir / "trace.jsonl", run_dir / "trace.1.jsonl"
        self._journal = Tail(self._journal_path)
        self._status = Tail(run_dir / "status.jsonl", run_dir / "status.1.jsonl")
        self._trace: Tail | None = None  # opened once the journal says how many ranks there are
        self._older: tuple[Tail, Phases] | None = None  # the pass from the beginning, while it is behind
        self._memory = Memory()
        self._rss_bytes: dict[str, int] = {}
        self._looked = 0.0
        self.is_behind = True  # there is more in the files than has been read
        self.has_caught_up = False  # what was there at the start has been read, but for a past that changes nothing now

    async def read(self) -> None:
        """Take in what is new, the journal first: it says whose phases the trace holds."""
        while lines := self._journal.read():
            await self._take(lines, self.job.take_journal)
        while lines := self._status.read():
            await self._take(lines, functools.partial(take_status, self.job))
        if not self.job.origin_ns:
            self.is_behind = False
            return
        if self._trace is None:
            self._trace = await self._begin_trace()
        lines = self._trace.read()
        await self._take(lines, self._take_trace)
        self.has_caught_up |= not lines
        if self._older is not None:
            await self._read_older(*self._older)
        self.is_behind = bool(lines) or self._older is not None

    async def _begin_trace(self) -> Tail:
        """Begin near the end if the trace is long."""
        assert self.job.settings is not None
        path, older_path = self._trace_paths
        newest = NEWEST_BYTES + NEWEST_BYTES_PER_RANK * self.job.settings.world_size
        if _size(path) + _size(older_path) <= 2 * newest:
            return Tail(path, older_path)
        self._older = Tail(path, older_path), self.job.begin_older()
        trace = Tail(path)
        missing = newest - trace.skip_to_last(newest)
        if missing > 0:  # it was begun anew not long ago
            before = Tail(older_path)
            before.skip_to_last(missing)
            while lines := before.read():
                await self._take(lines, self._take_trace)
            before.close()
        while lines := trace.read():
            await self._take(lines, self._take_trace)
        return trace

    async def _read_older(self, tail: Tail, phases: Phases) -> None:
        lines = tail.read(SLICE_BYTES)
        await self._take(lines, lambda line: take_trace(self.job, line, time.time_ns(), phases))
        if not lines:
            assert self._trace is not None
            self._trace.close()
            self._trace, self._older = tail, None
            self.job.finish_older()

    async def _take(self, lines: list[bytes], take: Callable[[bytes], None]) -> None:
        since = time.monotonic()
        for line in lines:
            take(line)
            if time.monotonic() - since > SLICE_SECONDS:  # pages wait, and perhaps the end was asked for
                await asyncio.sleep(0)
                since = time.monotonic()

    def _take_trace(self, line: bytes) -> None:
        take_trace(self.job, line, time.time_ns())

    def values(self) -> tuple[dict[str, object], dict[int, object], int, int]:
        """Topics, ranks, now and until when it is known what each rank did (ns since the job's start)."""
        job, silent_seconds = self.job, self._silent_seconds()
        wall_ns = time.time_ns()
        if is_silent(silent_seconds):  # its last sign of life is the last that is known of it
            wall_ns -= round(silent_seconds * 1e9)
        now_ns = job.now_ns(wall_ns)
        said = topics(job, now_ns, silent_seconds)
        return said, ranks(job, self._memory_now()), now_ns, job.known_ns(now_ns)

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
            return max(0.0, time.time() - self._journal_path.stat().st_mtime)
        except OSError:
            return math.inf

    def close(self) -> None:
        tails = (self._journal, self._status, self._trace, self._older and self._older[0])
        for tail in tails:
            if tail is not None:
                tail.close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
