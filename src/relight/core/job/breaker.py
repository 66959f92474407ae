"""The circuit breaker: whether one failure is too many for the job to continue."""

from relight.core.account.report import ENDED
from relight.core.account.verdict import describe_doubts
from relight.core.job.job import Job
from relight.core.membership.recent import Recent

MAX_OWN_FAILURES_PER_STEP = 10  # exceptions, hangs, broken collectives: the script may be their cause
# Failures that strike a process from outside. However often they do, a replacement may live: see membership/backoff.py.
FROM_OUTSIDE = frozenset({ENDED, "killed", "exited", "out of memory", "frozen", "slow", "drained", "host lost"})


class Breaker:
    """Count failures by step and by likeness."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._at_step: Recent[int] = Recent()
        self._alike: Recent[tuple[object, ...]] = Recent()  # by a key: failures with equal keys are alike

    def count_step(self, step: int) -> None:
        """Count the last failure for this step, unless it came from outside and no limit includes those."""
        job = self._job
        if job.settings.max_failures_per_step is not None or job.job_stats.failures.last.kind not in FROM_OUTSIDE:
            self._at_step.add(step)

    def count_alike(self, key: tuple[object, ...] | None) -> None:
        """Count a failure among those with the same key; None: it is like no other."""
        if key is not None:
            self._alike.add(key)

    def verdict(self, step: int, key: tuple[object, ...] | None, limit: int = 0) -> str:
        """The reason why the job cannot continue, or an empty string. `limit`: of failures alike; 0: the settings'."""
        job, last = self._job, self._job.job_stats.failures.last
        limit = limit or job.settings.max_identical_errors
        where = f"rank {last.rank} in {last.phase} of step {last.step}" if last.rank >= 0 else "all ranks"
        if key is not None and self._alike[key] >= limit:
            doubts = describe_doubts(job.job_stats.doubts.found)
            what = f"a bug, or comes of an earlier failure: {doubts}" if doubts else "a bug, not a failure"
            return f"{where}: {last.evidence} ({limit} times in the same place, so it is {what})"
        count, at_most = job.job_stats.failures.count, job.settings.max_failures
        if at_most is not None and count > at_most:
            return f"{count} failures, more than --max-failures {at_most}; last {where}"
        at_most = job.settings.max_failures_per_step
        at_most = MAX_OWN_FAILURES_PER_STEP if at_most is None else at_most
        if step >= 0 and self._at_step[step] > at_most:
            return f"step {step} failed {self._at_step[step]} times; last: {where}: {last.evidence}"
        return ""
