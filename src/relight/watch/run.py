"""One run directory, read as far as it is written, and what can be said of the job's life by it.

Files alone: it works on any host that sees the directory, such as a login node. A controller touches its journal every
few seconds; a journal without an end that has not changed for long is that of a job which was killed.
"""

import os
import time
from pathlib import Path

import msgspec

from relight.core.account.report import JobReport
from relight.dashboard.model.job import Job, take_status, take_trace
from relight.dashboard.sources.tail import Tail
from relight.server.records.journal import JOURNAL, SILENT_SECONDS
from relight.timeline.model.load import load_report
from relight.watch.run_dir import State

TRACE_BYTES = 2 * 2**20  # of the newest phase changes; and
TRACE_BYTES_PER_RANK = 8 * 1024


def judge(job: Job, silent_seconds: float) -> State:
    """Return the state of a job whose journal was touched so many seconds ago."""
    if job.ended is not None:
        return State.FAILED if job.ended.error else State.FINISHED
    return State.RUNNING if silent_seconds < SILENT_SECONDS else State.LOST


class Run:
    """A run directory, followed. `read` takes in what is new."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.job = Job()
        self._journal = Tail(run_dir / JOURNAL)
        self._status = Tail(run_dir / "status.jsonl", run_dir / "status.1.jsonl")
        self._trace: Tail | None = None

    def read(self) -> None:
        """Take in everything that is there by now; of the trace, at the first time, only the newest part."""
        while lines := self._journal.read():
            for line in lines:
                self.job.take_journal(line)
        while lines := self._status.read():
            for line in lines:
                take_status(self.job, line)
        if self._trace is None:
            self._trace = self._begin_trace()
        while lines := self._trace.read():
            self._take_trace(lines)

    def _begin_trace(self) -> Tail:
        newest = TRACE_BYTES + TRACE_BYTES_PER_RANK * len(self.job.rows)
        path, older = self.run_dir / "trace.jsonl", self.run_dir / "trace.1.jsonl"
        trace = Tail(path)
        missing = newest - trace.skip_to_last(newest)
        if missing > 0:  # it was begun anew not long ago
            before = Tail(older)
            before.skip_to_last(missing)
            while lines := before.read():
                self._take_trace(lines)
            before.close()
        return trace

    def _take_trace(self, lines: list[bytes]) -> None:
        for line in lines:
            take_trace(self.job, line, time.time_ns())

    def silent_seconds(self) -> float:
        """Since the controller last gave a sign of life."""
        try:
            return max(0.0, time.time() - os.stat(self.run_dir / JOURNAL).st_mtime)
        except OSError:
            return float("inf")

    def close(self) -> None:
        self._journal.close()
        self._status.close()
        if self._trace is not None:
            self._trace.close()


def read_report(run_dir: Path) -> tuple[JobReport, str] | str:
    """The report of a job; without one, what it would say now, and how the job stands. Or why there is neither."""
    loaded = load_report(run_dir)
    if not isinstance(loaded, str):
        return loaded, ""
    if (run_dir / "report.json").exists() or not (run_dir / JOURNAL).exists():
        return loaded
    return _report_so_far(run_dir)


def _report_so_far(run_dir: Path) -> tuple[JobReport, str]:
    """Return the report that a job without one would have now, by its journal, and the job's state in words."""
    run = Run(run_dir)
    run.read()
    run.close()
    job, silent_seconds = run.job, run.silent_seconds()
    is_running = judge(job, silent_seconds) is State.RUNNING
    seconds = job.now_ns(time.time_ns()) / 1e9 - (0.0 if is_running else silent_seconds)
    report = msgspec.structs.replace(
        job.report(),
        job=job.settings.job if job.settings else "",
        started_wall=job.origin_ns / 1e9,
        wall_seconds=max(0.0, seconds),
        steps=max(job.steps, job.report().steps),
    )
    if job.ended is not None:
        return report, "is over, but left no report"
    return report, "is still running" if is_running else "was killed: no controller runs it, and its journal has no end"
