"""RESTORING: every member reaches the target version; their states must agree before training resumes."""

from relight.core.job.attempts import Attempts
from relight.core.job.draining import Draining
from relight.core.job.failing import COLLECTIVE_GRACE_SECONDS, Failing
from relight.core.job.job import Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.job.saving import Saving
from relight.core.job.shutdown import Shutdown
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Notice, Resume
from relight.core.recovery.decision import Decision
from relight.core.recovery.fallback import Fallback
from relight.core.recovery.shards import Shards


class Restoring:
    """From Restore to Resume, and to the first step after it."""

    def __init__(
        self,
        job: Job,
        attempts: Attempts,
        reserve: Reserve,
        saving: Saving,
        failing: Failing,
        shutdown: Shutdown,
        draining: Draining,
    ) -> None:
        self._job, self._attempts, self._reserve = job, attempts, reserve
        self._saving, self._failing, self._shutdown, self._draining = saving, failing, shutdown, draining
        self.to_resume: set[str] = set()  # members that have not committed a step since the last recovery

    def on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        """A member holds the target version; with the last one, their states are compared."""
        job, attempt = self._job, self._job.attempt
        if job.stage is not Stage.RESTORING or event.generation != job.generation:
            return []
        if not job.is_member(event.process) or attempt.decision is None:
            return []
        attempt.restored[event.process] = event
        job.job_stats.recoveries.restored(event, now)
        if len(attempt.restored) < job.settings.world_size:
            return []
        reports = sorted(attempt.restored.values(), key=lambda e: e.rank)
        if problem := _handshake_mismatch(reports, attempt.decision.target, job.shards):
            return self._on_mismatch(problem, reports, attempt.decision, now)
        return self._resume(reports, attempt.decision, now)

    def _on_mismatch(self, problem: str, reports: list[ev.Restored], decision: Decision, now: float) -> list[Command]:
        """States differ: corrupted memory, if it is only their content; else the end of the job."""
        job = self._job
        digests = {report.rank: report.state_digest for report in reports}
        stayed = [rank for rank in digests if rank not in decision.targets]
        own = {*stayed, *decision.recalled}
        held = job.members.by_rank()
        voters = [rank for rank in stayed if not held[rank].replacement]  # others were copied in an earlier attempt
        alike = len({(r.version, r.lineage) for r in reports}) == 1
        if alike and not job.went_apart and any(report.alone for report in reports):
            return self._failing.on_apart(decision.target, now)
        alike = alike and not job.shards.differing({r.rank: r.layout_digest for r in reports})
        if alike and job.shards.differing({rank: digests[rank] for rank in own}):
            return self._failing.on_corruption(digests, voters, decision.target, 0, now)
        return job.end(problem, now)

    def _resume(self, reports: list[ev.Restored], decision: Decision, now: float) -> list[Command]:
        job = self._job
        job.stage, job.deadline = Stage.TRAINING, None
        job.fallback, job.went_apart = Fallback(), False
        job.go_alone = decision.runs_code  # should that code fail in a replacement, it is not tried again
        for process in job.members.by_rank().values():
            process.replacement = False
        job.members.predecessors.clear()
        job.forget_the_dead()
        if decision.targets:
            self._reserve.forget_errors()
        notice = Notice(why=job.job_stats.recoveries.describe(now), level="info")
        job.job_stats.recoveries.resumed(now)
        resume = Resume(
            generation=job.generation,
            buddies=job.buddies(),
            writers=job.writers(),
            doubts=job.job_stats.doubts.reasons,
            why=f"all ranks hold version {decision.target} "
            f"({job.shards.digest([report.state_digest for report in reports])})",
        )
        self.to_resume = set(job.members.names_by_rank().values())
        ending = self._shutdown.wind_down()
        return [resume, *(ending or self._draining.advance(now)), notice, *self._reserve.surplus()]

    def on_step_resumed(self, event: ev.StepResumed, now: float) -> list[Command]:
        """A member committed its first step. New standbys start after the last one: their start slows steps down."""
        job = self._job
        job.job_stats.recoveries.step_resumed(event, now)
        if event.process in self.to_resume:
            self.to_resume.discard(event.process)
            if not self.to_resume:
                self._prove()
        return self._reserve.top_up(now) if not self.to_resume and job.stage is Stage.TRAINING else []

    def _prove(self) -> None:
        """All members have committed a step: the recovery is over, and its replacements are of use."""
        self._attempts.succeed()
        self._job.go_alone = False
        for process in self._job.members.by_rank().values():
            process.proven = True

    @property
    def is_settled(self) -> bool:
        """True if no recovery is under way, its first step included."""
        return self._job.stage in (Stage.STARTING, Stage.TRAINING) and not self.to_resume

    # --- restores that fail -------------------------------------------------------------------------------------
    def on_restore_failed(self, event: ev.RestoreFailed, now: float) -> list[Command]:
        """A copy or the new group failed: most often the echo of a death, which is waited for."""
        job = self._job
        if job.stage is not Stage.RESTORING or event.generation != job.generation:
            return []
        if job.attempt.suspected_restore is None:
            job.attempt.suspected_restore = event
            job.deadline = now + COLLECTIVE_GRACE_SECONDS
        return []

    def on_restore_timeout(self, now: float) -> list[Command]:
        """Begin the recovery again. No rank can be blamed for the restore; one that then does not stop, can."""
        job, event = self._job, self._job.attempt.suspected_restore
        evidence = event.evidence if event else f"not done within {job.settings.restore_timeout_seconds:g} s"
        evidence = f"restoring: {evidence}"
        step = self._failing.recovery_step
        job.job_stats.failures.add(None, "communication", evidence, None, 0, job.generation, now, step)
        notices = self._attempts.fail(now, evidence, now)
        if used_up := self._attempts.used_up():
            return self._saving.give_up(f"{used_up}; last: {evidence}", now)
        return [*self._failing.open_generation(now, job.settings.stop_timeout_seconds), *notices]


def _handshake_mismatch(reports: list[ev.Restored], target: int, shards: Shards) -> str:
    """Return the reason why the members must not train on together (rule 8), or an empty string."""
    peers: dict[str, ev.Restored] = {}  # the first holder of each part of the state
    for report in reports:
        peer = peers.setdefault(shards.key(report.rank), report)
        if report.version != target:
            return f"rank {report.rank} is at version {report.version} after a restore to {target}"
        for what, first in (("lineage", reports[0]), ("layout_digest", peer), ("state_digest", peer)):
            mine, theirs = getattr(report, what), getattr(first, what)
            if mine != theirs:
                return (
                    f"after the restore to version {target}, {what.replace('_', ' ')} of rank {report.rank} is {mine}, "
                    f"of rank {first.rank} {theirs}: halting rather than training on replicas that differ"
                )
    return ""
