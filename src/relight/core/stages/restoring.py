"""RESTORING: every member reaches the target version; they must agree before anybody goes on."""

from relight.core import events as ev
from relight.core.attempt import Fallback
from relight.core.commands import Audience, Command, Notice, Resume
from relight.core.shards import Shards
from relight.core.stages.failing import COLLECTIVE_GRACE_SECONDS, Failing
from relight.core.stages.state import Stage


class Restoring(Failing):
    """From Restore to Resume, and to the first step after it."""

    def _on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        if self.stage is not Stage.RESTORING or event.generation != self.generation:
            return []
        if not self._is_member(event.process) or self._attempt.decision is None:
            return []
        self._attempt.restored[event.process] = event
        self.job_stats.restored(event, now)
        if len(self._attempt.restored) < self.settings.world_size:
            return []
        reports = sorted(self._attempt.restored.values(), key=lambda e: e.rank)
        problem = _handshake_mismatch(reports, self._attempt.decision.target, self.shards)
        if problem:
            digests = {report.rank: report.state_digest for report in reports}
            stood = [rank for rank in digests if rank not in self._attempt.decision.targets]
            of_their_own = {*stood, *self._attempt.decision.recalled}
            held = self.members.by_rank()
            voters = [rank for rank in stood if not held[rank].replacement]  # others were copied before it began again
            alike = len({(r.version, r.lineage) for r in reports}) == 1
            alike = alike and not self.shards.differing({r.rank: r.layout_digest for r in reports})
            if alike and self.shards.differing({rank: digests[rank] for rank in of_their_own}):
                return self._on_corruption(digests, voters, self._attempt.decision.target, 0, now)
            return self._end(problem, now)
        self.stage, self._deadline = Stage.TRAINING, None
        self._fallback = Fallback()
        for process in self.members.by_rank().values():
            process.replacement = False
        self.members.predecessors.clear()
        self._forget_the_dead()
        if self._attempt.decision.targets:
            self._standby_errors.clear()
        notice = Notice(why=self.job_stats.describe_recovery(now), level="info")
        self.job_stats.resumed(now)
        out: list[Command] = [
            Resume(
                audience=Audience.MEMBERS,
                generation=self.generation,
                buddies=self._buddies(),
                writers=self._writers(),
                doubts=self.job_stats.doubts.reasons,
                why=f"all ranks hold version {self._attempt.decision.target} "
                f"({self.shards.digest([report.state_digest for report in reports])})",
            )
        ]
        self._to_resume = set(self.members.audience(Audience.MEMBERS))
        return [*out, *self._wind_down(), notice, *self._surplus()]

    def _on_step_resumed(self, event: ev.StepResumed, now: float) -> list[Command]:
        """A new standby is started once the interrupted step is done: its start would slow the redo down."""
        self.job_stats.step_resumed(event, self.settings.world_size, now)
        if event.process in self._to_resume:
            self._to_resume.discard(event.process)
            if not self._to_resume:
                self._prove()
        return self._top_up_standbys(now) if not self._to_resume and self.stage is Stage.TRAINING else []

    def _prove(self) -> None:
        """All members have committed a step: the recovery is over, and its replacements are of use."""
        self._note_success()
        for process in self.members.by_rank().values():
            process.proven = True

    def _on_restore_failed(self, event: ev.RestoreFailed, now: float) -> list[Command]:
        if self.stage is not Stage.RESTORING or event.generation != self.generation:
            return []
        if self._attempt.suspected_restore is None:  # most often the echo of a death, as with collectives
            self._attempt.suspected_restore = event
            self._deadline = now + COLLECTIVE_GRACE_SECONDS
        return []

    def _on_restore_timeout(self, now: float) -> list[Command]:
        """Nobody can be blamed for a restore that does not end; who then does not stand still, can."""
        event = self._attempt.suspected_restore
        evidence = event.evidence if event else f"not done within {self.settings.restore_timeout_seconds:g} s"
        self.job_stats.failure(
            None, "communication", f"restoring: {evidence}", None, 0, self.generation, now, self._recovery_step
        )
        said = self._note_failed_attempt(now, f"restoring: {evidence}", now)
        if used_up := self._attempts_used_up():
            return self._give_up(f"{used_up}; last: restoring: {evidence}", now)
        return [*self._open_generation(now, self.settings.stop_timeout_seconds), *said]


def _handshake_mismatch(reports: list[ev.Restored], target: int, shards: Shards) -> str:
    """Why the members must not train on together (rule 8), or an empty string."""
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
