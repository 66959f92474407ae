"""TRAINING: failures of no process, or of a process that is not known yet."""

from relight.core.job.failing import COLLECTIVE_GRACE_SECONDS, Failing
from relight.core.job.job import Job, Stage
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Kill, Notice
from relight.core.recovery.corruption import describe_difference, outvoted
from relight.core.stages.restoring import Restoring

MAX_BROKEN_COLLECTIVES = 5  # in one step, while every process lives


class Training:
    """From Begin or Resume to the next failure, or to the end."""

    def __init__(self, job: Job, failing: Failing, restoring: Restoring) -> None:
        self._job, self._failing, self._restoring = job, failing, restoring

    def on_collective_failed(self, event: ev.CollectiveFailed, now: float) -> list[Command]:
        """A collective broke: wait a moment for the death that caused it."""
        job = self._job
        if job.stage is not Stage.TRAINING or event.generation != job.generation:
            return []
        if job.attempt.suspected_collective is None:
            job.attempt.suspected_collective = event
            job.deadline = now + COLLECTIVE_GRACE_SECONDS
        return []

    def on_grace_over(self, now: float) -> list[Command]:
        """No death was reported: the network failed."""
        job, event = self._job, self._job.attempt.suspected_collective
        if event is None:
            return []
        evidence = f"a collective of rank {event.rank} broke while every process lives: {event.summary}"
        job.job_stats.failures.add(
            None, "communication", evidence, None, event.noticed_ns, job.generation, now, event.step
        )
        key = ("communication", event.step)
        return self._failing.fail([], event.step, key, now, limit=MAX_BROKEN_COLLECTIVES)

    def on_stalled(self, event: ev.CommunicationStalled, now: float) -> list[Command]:
        """No rank makes progress, and none is behind the others."""
        job = self._job
        if job.stage is not Stage.TRAINING:
            return []
        job.job_stats.failures.add(
            None,
            "communication",
            event.evidence,
            None,
            event.noticed_ns,
            job.generation,
            now,
            event.step,
            stack=event.stack,
            waited_seconds=event.idle_seconds,
        )
        return self._failing.fail([], event.step, ("stall", event.step), now)

    def on_state_differs(self, event: ev.StateDiffers, now: float) -> list[Command]:
        """Replicas compared their states and they differ; every rank reports it, the first report counts."""
        job = self._job
        if job.stage is not Stage.TRAINING or event.generation != job.generation:
            return []
        digests = dict(enumerate(event.digests))
        if len(digests) != job.settings.world_size or not job.shards.differing(digests):
            return []  # nonsense, by which no rank can be blamed
        if event.step == job.began_at + 1:
            # After the first step it is the script, and next to nothing is lost: replacing a rank would not help.
            part = job.shards.differing(digests)[0]
            known = outvoted(part, part.keys()) is not None
            return job.end(describe_difference(part, event.step, event.tensors, majority=known), now)
        return self._failing.on_corruption(digests, digests, event.step, event.noticed_ns, now, event.tensors)

    def on_rank_slow(self, event: ev.RankSlow) -> list[Command]:
        """A rank is slow, which is no failure. If asked for, a warm standby takes its rank."""
        job = self._job
        process = job.members.processes.get(event.process)
        if process is None or job.stage is not Stage.TRAINING or not job.is_member(event.process) or process.leaving:
            return []
        out: list[Command] = []
        if not process.slow:
            process.slow = True
            text = f"rank {process.rank} is slow, and all others wait for it: {event.evidence}"
            job.job_stats.notice(text)
            out.append(Notice(why=text, level="warning"))
        wanted = job.settings.replace_slow and job.members.ready_standbys() and not job.lost_without(process)
        if wanted and not self._restoring.to_resume:  # one recovery at a time
            process.leaving = event.evidence
            out.append(Kill(process=process.name, why=event.evidence, after_step=True))
        return out
