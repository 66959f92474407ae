"""Ending a job before its last step because it is asked to: at once, or after one more step and a checkpoint."""

from relight.core.job.job import Job, Stage
from relight.core.job.saving import Saving
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Notice, WindDown


class Shutdown:
    """Requests to end the job, in any stage."""

    def __init__(self, job: Job, saving: Saving) -> None:
        self._job, self._saving = job, saving
        self.reason = ""  # why the job is to end after its next step; empty: it is not

    def on_shutdown(self, event: ev.ShutdownRequested, now: float) -> list[Command]:
        """End at once; or, if there is time for it and the job keeps checkpoints, after one more step."""
        job = self._job
        if event.after_step and (self.reason or job.stage is Stage.SAVING):
            return []  # each host may say it; and the job ends anyway
        if job.stage is Stage.SAVING:
            return self._saving.end_unsaved(event.reason, now)
        under_way = job.stage in (Stage.TRAINING, Stage.STOPPING, Stage.RESTORING)
        if not (event.after_step and under_way and job.checkpoint_every):
            return job.end(f"stopped: {event.reason}", now)
        self.reason = event.reason
        notice = Notice(why=f"{event.reason}: a last step and a checkpoint, then the job ends", level="info")
        return [notice, *self.wind_down()]

    def wind_down(self) -> list[Command]:
        """Order the last step, again in each generation: no rank remembers the order across a recovery."""
        if not self.reason:
            return []
        return [WindDown(generation=self._job.generation, why=self.reason)]

    def forget_reason(self) -> None:
        """Note that the last step was the last one anyway."""
        self.reason = ""
