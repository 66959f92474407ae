"""SAVING: the job must end, but its newest version is still held: a last checkpoint, then the end."""

import msgspec

from relight.core.job.job import Job, Stage
from relight.core.membership.members import Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, Kill, Notice, Save
from relight.core.recovery.attempt import Ending
from relight.core.recovery.decision import derived_ranks
from relight.core.recovery.fallback import last_checkpoint

SAVE_SECONDS = 600.0  # to write; then the job ends without


class Saving:
    """From the decision to end the job to its end. No rank is restored or replaced any more."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ending = Ending()

    @property
    def order(self) -> Save | None:
        """The order to write a last checkpoint, once it is given."""
        return self._ending.order

    def give_up(self, error: str, now: float, raised: ev.WorkerFailed | None = None) -> list[Command]:
        """End the job; if it keeps checkpoints and every part of the state may still be held, after a last one.

        Not while ranks fall back, or distrust their replicas: that tier holds the version already, and the ranks' own
        state is half discarded, or may be corrupted.
        """
        job = self._job
        under_way = job.stage in (Stage.TRAINING, Stage.STOPPING, Stage.RESTORING)
        sound = not (job.fallback.is_under_way or job.fallback.distrusts)
        if not (under_way and job.checkpoint_every and sound) or job.lost_without():
            return job.end(error, now, raised)
        self._ending = Ending(error=error, raised=raised)
        return self.begin(now)

    def begin(self, now: float) -> list[Command]:
        """Ask all ranks to pause, in a new generation."""
        self._job.go_alone = True
        stop = self._job.stop_everyone("the job must end, after a last checkpoint", now)
        self._job.stage, self._ending = Stage.SAVING, msgspec.structs.replace(self._ending, order=None)
        return [Notice(why=f"{self._ending.error}: the job must end, after a last checkpoint", level="warning"), stop]

    def lose(self, processes: list[Process], now: float) -> list[Command]:
        """Processes failed. Before the order to write, the others may do without them; later the job ends unsaved."""
        for process in processes:
            self._job.members.fail(process)
        if self.order is not None:
            ranks = ", ".join(str(process.rank) for process in processes)
            return self.end_unsaved(f"rank {ranks} failed while it was written", now)
        return self.save_once_still(now)

    def save_once_still(self, now: float) -> list[Command]:
        """Order the checkpoint as soon as every holder of state is paused, and every failed process is dead."""
        job = self._job
        if job.stage is not Stage.SAVING:
            return []
        if self.order is not None:
            return self.begin(now) if self._can_do_without_what_is_gone(self.order) else []
        if job.lost_without():
            return self.end_unsaved("a part of the state was lost before it could be written", now)
        held = {rank: p for rank, p in job.members.by_rank().items() if p.may_hold_state}
        if job.members.dying() or any(p.name not in job.attempt.stopped for p in held.values()):
            return []
        reports = [job.attempt.stopped[p.name] for p in held.values()]
        absent = set(range(job.settings.world_size)) - {r.rank for r in reports if not r.blank}
        private = {rank: job.members.private_versions(rank) for rank in sorted(absent)}
        last = last_checkpoint(reports, private, job.shards, job.settings.world_size)
        if isinstance(last, str):
            return self.end_unsaved(last, now)
        job.deadline = now + SAVE_SECONDS
        order = Save(
            generation=job.generation,
            target=last.target,
            rank=last.writers[0][1],
            writers=last.writers,
            absent=tuple(private),
            derived=last.derived,
            why=f"a last checkpoint, of version {last.target}: {last.reason}",
        )
        self._ending = msgspec.structs.replace(self._ending, order=order)
        return [order]

    def _can_do_without_what_is_gone(self, save: Save) -> bool:
        """Return whether private state that the order relies on was lost with an agent, and follows from rank and step.

        If it does not follow, the order stands: a successor of the agent may have it from a process that lives there.
        """
        needed = set(save.absent) - set(save.derived)
        gone = {rank for rank in needed if save.target not in self._job.members.private_versions(rank)}
        stopped = tuple(self._job.attempt.stopped.values())
        return bool(gone) and gone <= set(derived_ranks(stopped, dict.fromkeys(gone, ())))

    def on_saved(self, event: ev.Saved, now: float) -> list[Command]:
        """The checkpoint is complete, or a rank could not do its part: the job ends."""
        job = self._job
        if job.stage is not Stage.SAVING or self.order is None or event.generation != job.generation:
            return []
        if event.error:
            return self.end_unsaved(event.error, now)
        job.job_stats.saved(event.version, event.path)
        text = f"A checkpoint of step {event.version} was saved as {event.path}: start the same command again to go on"
        return job.end(f"{self._ending.error}. {text}", now, self._ending.raised)

    def on_save_timeout(self, now: float) -> list[Command]:
        """Do without ranks that do not pause; end the job if the checkpoint is not written in time."""
        job = self._job
        if self.order is not None:
            return self.end_unsaved(f"it was not done within {SAVE_SECONDS:g} s", now)
        late = self.late(now)
        out = [*self.blame_late(late, now), *self.lose(late, now)]
        if job.stage is Stage.SAVING and self.order is None:
            left = (p.asked_at + job.attempt.stop_limit_seconds for p in self.moving())
            job.deadline = min(left, default=now + SAVE_SECONDS)
        return out

    def end_unsaved(self, why: str, now: float) -> list[Command]:
        """End the job without a last checkpoint."""
        return self._job.end(f"{self._ending.error}. No last checkpoint was written: {why}", now, self._ending.raised)

    # --- processes that do not pause ----------------------------------------------------------------------------
    def moving(self) -> list[Process]:
        """Members that have not answered Stop; of a job that ends, those that may hold state."""
        job = self._job
        held = [p for p in job.members.by_rank().values() if p.name not in job.attempt.stopped]
        return held if job.stage is Stage.STOPPING else [p for p in held if p.may_hold_state]

    def late(self, now: float) -> list[Process]:
        """Members that have not answered Stop within their time."""
        job = self._job
        if job.stage is not Stage.STOPPING and (job.stage is not Stage.SAVING or self.order is not None):
            return []
        return [p for p in self.moving() if p.asked_at + job.attempt.stop_limit_seconds <= now]

    def blame_late(self, late: list[Process], now: float, evidence: str = "") -> list[Command]:
        """Record a failure of each of these processes, and kill it."""
        job = self._job
        evidence = evidence or f"did not stop within {job.attempt.stop_limit_seconds:g} s"
        for process in late:
            job.job_stats.failures.add(process, "hang", evidence, process.final_position, 0, job.generation, now)
        return [Kill(process=process.name, why=evidence) for process in late]
