"""Attempts to bring in a replacement: after several failures in a row the next attempt waits."""

from relight.core.job.job import Job
from relight.core.membership.backoff import LONGEST_PAUSE_SECONDS, SAID_AGAIN_AFTER, Backoff
from relight.core.protocol.commands import Command, Notice


class Attempts:
    """Count failed attempts, put the next one off, and say so."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.backoff = Backoff()
        self.next_at: float | None = None  # when the attempt that was put off begins
        self._announced = False  # that attempts fail, since the last success

    def is_put_off(self, now: float) -> bool:
        """Return whether the next attempt must wait. It then begins by itself."""
        if now >= self.backoff.until:
            return False
        self.next_at = self.backoff.until
        return True

    def fail(self, begun_at: float, evidence: str, now: float) -> list[Command]:
        """Note that a replacement was lost before it was of use, or could not be restored."""
        if not self.backoff.fail(begun_at, now, evidence):
            return []
        seconds = self.backoff.until - now
        if not seconds:
            return []
        limit = self._job.settings.max_failed_attempts
        until = "as long as an intact replica is left" if limit is None else f"{limit} times at most"
        text = (
            f"{self.backoff.failed} attempts in a row to start or restore a process have failed within "
            f"{now - self.backoff.since:.0f} s (the last: {evidence}); the next begins in {seconds:g} s, each later "
            f"one after twice the time, at most {LONGEST_PAUSE_SECONDS:g} s, {until} (--max-failed-attempts)"
        )
        announced, self._announced = self._announced, True
        if announced and self.backoff.failed % SAID_AGAIN_AFTER:
            return []
        self._job.job_stats.notice(text)
        return [Notice(why=text, level="warning")]

    def used_up(self) -> str:
        """The reason to make no more, if the user has set a limit and it is reached; or an empty string."""
        limit = self._job.settings.max_failed_attempts
        if limit is None or self.backoff.failed < limit:
            return ""
        return (
            f"{self.backoff.failed} attempts in a row to start or restore a process have failed "
            f"(--max-failed-attempts {limit})"
        )

    def succeed(self) -> None:
        """Note that a replacement is of use: earlier failures do not count any more."""
        self.backoff.succeed()
        self.next_at = None
        self._announced = False
