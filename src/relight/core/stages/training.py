"""TRAINING: what can go wrong while no process has failed, or before it is known which."""

from relight.core import events as ev
from relight.core.commands import Command, Kill, Notice
from relight.core.corruption import describe_difference, outvoted
from relight.core.stages.failing import COLLECTIVE_GRACE_SECONDS, MAX_BROKEN_COLLECTIVES, Failing
from relight.core.stages.state import Stage


class Training(Failing):
    """From Begin or Resume to the next failure, or to the end."""

    def _on_collective_failed(self, event: ev.CollectiveFailed, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING or event.generation != self.generation:
            return []
        if self._attempt.suspected_collective is None:
            self._attempt.suspected_collective = event
            self._deadline = now + COLLECTIVE_GRACE_SECONDS
        return []

    def _on_grace_over(self, now: float) -> list[Command]:
        event = self._attempt.suspected_collective
        if event is None:
            return []
        evidence = f"a collective of rank {event.rank} broke while every process lives: {event.summary}"
        self.job_stats.failure(
            None, "communication", evidence, None, event.noticed_ns, self.generation, now, event.step
        )
        return self._fail([], event.step, ("communication", event.step), now, limit=MAX_BROKEN_COLLECTIVES)

    def _on_stalled(self, event: ev.CommunicationStalled, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING:
            return []
        self.job_stats.failure(
            None,
            "communication",
            event.evidence,
            None,
            event.noticed_ns,
            self.generation,
            now,
            event.step,
            stack=event.stack,
            waited_seconds=event.idle_seconds,
        )
        return self._fail([], event.step, ("stall", event.step), now)

    def _on_state_differs(self, event: ev.StateDiffers, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING or event.generation != self.generation:
            return []  # every rank says it; once is enough
        digests = dict(enumerate(event.digests))
        if len(digests) != self.settings.world_size or not self.shards.differing(digests):
            return []  # nonsense: nobody can be blamed by it
        if event.step == self.began_at + 1:
            # Right behind the first step it is the script, and next to nothing is lost: no use in replacing anybody.
            part = self.shards.differing(digests)[0]
            known = outvoted(part, part.keys()) is not None
            return self._end(describe_difference(part, event.step, event.tensors, majority=known), now)
        return self._on_corruption(digests, digests, event.step, event.noticed_ns, now, event.tensors)

    def _on_rank_slow(self, event: ev.RankSlow) -> list[Command]:
        """No failure: training goes on. With a warm standby, and if asked for, another process takes its rank."""
        process = self.members.processes.get(event.process)
        if process is None or self.stage is not Stage.TRAINING or not self._is_member(event.process) or process.leaving:
            return []
        out: list[Command] = []
        if not process.slow:
            process.slow = True
            text = f"rank {process.rank} is slow, and all others wait for it: {event.evidence}"
            self.job_stats.notice(text)
            out.append(Notice(why=text, level="warning"))
        wanted = self.settings.replace_slow and self.members.ready_standbys() and not self._lost_without(process)
        if wanted and not self._to_resume:  # one recovery at a time
            process.leaving = event.evidence
            out.append(Kill(process=process.name, why=event.evidence, after_step=True))
        return out
