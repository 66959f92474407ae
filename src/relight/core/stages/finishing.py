"""FINISHING: training is done, and the scripts run to their ends."""

from relight.core import events as ev
from relight.core.commands import Audience, Command, Kill, Release
from relight.core.members import Process
from relight.core.stages.failing import Failing
from relight.core.stages.state import Stage


class Finishing(Failing):
    """From the last step to the end of the last process."""

    def _on_done(self, event: ev.TrainingDone, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING or event.generation != self.generation:
            return []
        if not self._is_member(event.process):
            return []
        self._done[event.process] = event
        if len(self._done) < self.settings.world_size:
            return []
        reports = sorted(self._done.values(), key=lambda e: e.rank)
        for report in reports[1:]:
            if (report.version, report.lineage) != (reports[0].version, reports[0].lineage):
                return self._end(
                    f"rank {report.rank} finished at version {report.version}, rank 0 at {reports[0].version}", now
                )
        digests = {report.rank: report.state_digest for report in reports}
        if self.shards.differing(digests):
            return self._on_corruption(digests, digests, reports[0].version, 0, now)
        self.stage, self._deadline = Stage.FINISHING, None
        self.ledger.finished(reports, self.shards.digest([report.state_digest for report in reports]), now)
        out: list[Command] = [
            Release(audience=Audience.MEMBERS, generation=self.generation, why="every rank committed its last step")
        ]
        for standby in self.members.standbys():
            self.members.fail(standby)
            out.append(Kill(process=standby.name, why="training finished"))
        return out

    def _on_exit_after_training(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        if process.rank is not None and not process.failed and event.exit_status not in (0, None):
            raised = self._tracebacks.get(process.name)
            what = raised.summary if raised else event.evidence
            return self._end(
                f"training finished, but rank {process.rank} failed in the code after the last step: {what}",
                now,
                raised,
            )
        return self._end_if_all_ended(now)

    def _end_if_all_ended(self, now: float) -> list[Command]:
        return [] if any(p.alive for p in self.members.processes.values()) else self._end("", now)
