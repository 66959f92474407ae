"""Requests to end the job: by a signal, or by `relight run` through its observer connection."""

from relight.core.protocol.events import ShutdownRequested
from relight.server.job.driver import Driver
from relight.server.job.job import Job
from relight.server.job.job_end import JobEnd
from relight.wire.settings import END_BY_HAND

LAUNCHER_GONE = "`relight run` was killed"


class Shutdown:
    """Turns a request into an event for the core, or hurries a job that is ending already."""

    def __init__(self, job: Job, driver: Driver, end: JobEnd) -> None:
        self._job = job
        self._driver = driver
        self._end = end

    def request(self, reason: str) -> None:
        """End the job; a second request stops waiting for agents."""
        if self._end.command is not None:
            self._end.hurry()
            return
        version = self._job.board.committed()  # the core hears of steps only when something happens
        after_step = reason in ("SIGTERM", LAUNCHER_GONE, END_BY_HAND)
        self._driver.feed(ShutdownRequested(reason=reason, after_step=after_step, version=version))
