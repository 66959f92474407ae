"""STOPPING: every member is paused and reports, every rank has a process, the failed are dead: then decide."""

from relight.core.job.attempts import Attempts
from relight.core.job.failing import Failing
from relight.core.job.job import Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.job.saving import Saving
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command
from relight.core.stages.deciding import Deciding


class Stopping:
    """From Stop to the decision."""

    def __init__(
        self, job: Job, attempts: Attempts, reserve: Reserve, saving: Saving, failing: Failing, deciding: Deciding
    ) -> None:
        self._job, self._attempts, self._reserve = job, attempts, reserve
        self._saving, self._failing, self._deciding = saving, failing, deciding

    def on_stopped(self, event: ev.Stopped, now: float) -> list[Command]:
        """A member is paused, and reports the state that it holds."""
        job = self._job
        if job.stage not in (Stage.STOPPING, Stage.SAVING) or event.generation != job.generation:
            return []
        if not job.is_member(event.process):
            return []
        job.attempt.stopped[event.process] = event
        job.job_stats.recoveries.stopped(event, now)
        return self.advance(now)

    def on_stop_timeout(self, now: float) -> list[Command]:
        """Members that have not answered have failed; standbys that are not warm are not waited for any longer."""
        if late := self._saving.late(now):
            return [*self._saving.blame_late(late, now), *self._failing.fail(late, -1, None, now)]
        job, limit = self._job, self._job.attempt.stop_limit_seconds
        out = self._reserve.fill_vacancies(now)
        if job.deadline is None:
            job.deadline = min((p.asked_at + limit for p in self._saving.moving()), default=now + limit)
        return out

    def advance(self, now: float) -> list[Command]:
        """Decide as soon as every rank has a process, all are paused, and every failed process is known dead."""
        job = self._job
        if job.stage is Stage.SAVING:
            return self._saving.save_once_still(now)
        if job.stage is not Stage.STOPPING:
            return []
        if not job.members.is_complete(job.settings.world_size):
            return self._reserve.fill_vacancies(now)
        stopped = job.attempt.stopped
        if len(stopped) < job.settings.world_size:  # the usual answer, without a look at every rank
            return []
        if job.members.dying() or any(name not in stopped for name in job.members.names_by_rank().values()):
            return []
        if self._attempts.is_put_off(now):
            return []
        return self._deciding.decide(now) if self._deciding.can_decide else self._failing.on_alone(now)
