"""FINISHING: training is done, and the scripts run to their ends."""

from relight.core import events as ev
from relight.core.commands import Audience, Command, Kill, Notice, Release
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
        self._attempt.done[event.process] = event
        if len(self._attempt.done) < self.settings.world_size:
            return []
        reports = sorted(self._attempt.done.values(), key=lambda e: e.rank)
        for report in reports[1:]:
            if (report.version, report.lineage) != (reports[0].version, reports[0].lineage):
                return self._end(
                    f"rank {report.rank} finished at version {report.version}, rank 0 at {reports[0].version}", now
                )
        digests = {report.rank: report.state_digest for report in reports}
        if self.shards.differing(digests):
            return self._on_corruption(digests, digests, reports[0].version, 0, now)
        self.stage, self._deadline = Stage.FINISHING, None
        if reports[0].version >= self.until:
            self._winding_down = ""  # it was the last step anyway
        self.job_stats.finished(reports, self.shards.digest([report.state_digest for report in reports]), now)
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
        if any(p.alive for p in self.members.processes.values()):
            return []
        if not self._winding_down:
            return self._end("", now)
        version = next(iter(self._attempt.done.values())).version
        return self._end(
            f"stopped: {self._winding_down}, after {version} of {self.until} steps. Start the same command again to go "
            "on from the newest checkpoint",
            now,
        )

    def _on_shutdown(self, event: ev.ShutdownRequested, now: float) -> list[Command]:
        """At once; or, if there is time for it and anything to go on from later, after one more step."""
        if event.after_step and (self._winding_down or self.stage is Stage.SAVING):
            return []  # each host may say it; and the job ends anyway
        if self.stage is Stage.SAVING:
            return self._end_unsaved(event.reason, now)
        under_way = self.stage in (Stage.TRAINING, Stage.STOPPING, Stage.RESTORING)
        if not (event.after_step and under_way and self.checkpoint_every):
            return self._end(f"stopped: {event.reason}", now)
        self._winding_down = event.reason
        notice = Notice(why=f"{event.reason}: a last step and a checkpoint, then the job ends", level="info")
        return [notice, *self._wind_down()]
