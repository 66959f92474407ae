"""FINISHING: training is done, and the scripts run to their ends."""

from relight.core.job.draining import Draining
from relight.core.job.failing import Failing
from relight.core.job.job import Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.job.shutdown import Shutdown
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Kill, Release


class Finishing:
    """From the last step to the end of the last process."""

    def __init__(self, job: Job, reserve: Reserve, failing: Failing, shutdown: Shutdown, draining: Draining) -> None:
        self._job, self._reserve, self._failing, self._shutdown = job, reserve, failing, shutdown
        self._draining = draining
        self.released: set[str] = set()  # processes that have run to the end of the script

    def on_done(self, event: ev.TrainingDone, now: float) -> list[Command]:
        """A rank committed its last step; with the last rank, all are released."""
        job = self._job
        if job.stage is not Stage.TRAINING or event.generation != job.generation:
            return []
        if not job.is_member(event.process):
            return []
        done = job.attempt.done
        done[event.process] = event
        if len(done) < job.settings.world_size:
            return []
        reports = sorted(done.values(), key=lambda e: e.rank)
        first = reports[0]
        for report in reports[1:]:
            if (report.version, report.lineage) != (first.version, first.lineage):
                return job.end(
                    f"rank {report.rank} finished at version {report.version}, rank 0 at {first.version}", now
                )
        digests = {report.rank: report.state_digest for report in reports}
        if job.shards.differing(digests):
            return self._failing.on_corruption(digests, digests, first.version, 0, now)
        if first.version < job.until and not self._shutdown.reason and self._draining.ordered_in == job.generation:
            return self._move_ranks(first.version, now)
        job.stage, job.deadline = Stage.FINISHING, None
        if first.version >= job.until:
            self._shutdown.forget_reason()
        job.job_stats.finished(reports, job.shards.digest([report.state_digest for report in reports]), now)
        why = "every rank committed its last step"
        release = Release(generation=job.generation, why=why)
        return [release, *self._reserve.end_all()]

    def _move_ranks(self, version: int, now: float) -> list[Command]:
        """All ranks have paused after the same step: those of drained hosts end, and standbys take their places."""
        leaving = self._draining.take_leave(version, now)
        kills: list[Command] = [Kill(process=p.name, why=f"its host is drained: {p.leaving}") for p in leaving]
        return kills + self._failing.fail(leaving, version, None, now)

    def on_released(self, event: ev.WorkerReleased) -> list[Command]:
        """A rank ran to the end of the script; its exit is expected."""
        self.released.add(event.process)
        return []

    def on_exit(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        """A process ended after training: the job ends with the last of them, or at once with an error."""
        if process.rank is not None and not process.failed and event.exit_status not in (0, None):
            raised = self._job.tracebacks.get(process.name)
            what = raised.summary if raised else event.evidence
            return self._job.end(
                f"training finished, but rank {process.rank} failed in the code after the last step: {what}",
                now,
                raised,
            )
        return self.end_if_all_ended(now)

    def end_if_all_ended(self, now: float) -> list[Command]:
        """End the job once no process lives."""
        job = self._job
        if any(p.alive for p in job.members.processes.values()):
            return []
        if not self._shutdown.reason:
            return job.end("", now)
        version = next(iter(job.attempt.done.values())).version
        return job.end(
            f"stopped: {self._shutdown.reason}, after {version} of {job.until} steps. Start the same command again to "
            "go on from the newest checkpoint",
            now,
        )
