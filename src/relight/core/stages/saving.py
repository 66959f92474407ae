"""SAVING: the job must end, but what it has reached is still held: a last checkpoint, then the end."""

import msgspec

from relight.core import events as ev
from relight.core.attempt import Ending
from relight.core.commands import Audience, Command, Kill, Notice, Save
from relight.core.decision import derived_ranks
from relight.core.fallback import last_checkpoint
from relight.core.members import Process
from relight.core.stages.reserve import Reserve
from relight.core.stages.state import Stage

SAVE_SECONDS = 600.0  # to write; then the job ends without


class Saving(Reserve):
    """From the decision to end the job to its end. Nothing is restored or replaced any more."""

    def _give_up(self, error: str, now: float, raised: ev.WorkerFailed | None = None) -> list[Command]:
        """The job must end. If it keeps checkpoints, and every part of the state may still be held: one more first.

        Not where ranks were on their way to a fallback tier: that tier holds what they hold, or half gone, or
        nobody knows what it is worth.
        """
        under_way = self.stage in (Stage.TRAINING, Stage.STOPPING, Stage.RESTORING)
        sound = not (self._fallback.is_under_way or self._fallback.distrusts)
        if not (under_way and self.checkpoint_every and sound) or self._lost_without():
            return self._end(error, now, raised)
        self._ending = Ending(error=error, raised=raised)
        return self._begin_saving(now)

    def _begin_saving(self, now: float) -> list[Command]:
        stop = self._stop_everyone("the job must end, after a last checkpoint", now)
        self.stage, self._ending = Stage.SAVING, msgspec.structs.replace(self._ending, order=None)
        return [Notice(why=f"{self._ending.error}: the job must end, after a last checkpoint", level="warning"), stop]

    def _lose(self, processes: list[Process], now: float) -> list[Command]:
        """A failure now. While nothing is written the others may do without; later it is one failure too many."""
        for process in processes:
            self.members.fail(process)
        if self._ending.order is not None:
            ranks = ", ".join(str(process.rank) for process in processes)
            return self._end_unsaved(f"rank {ranks} failed while it was written", now)
        return self._save_once_still(now)

    def _save_once_still(self, now: float) -> list[Command]:
        """As soon as all who may hold state stand still, and every failed process is known dead: say what to write."""
        if self.stage is not Stage.SAVING:
            return []
        if self._ending.order is not None:
            return self._begin_saving(now) if self._can_do_without_what_is_gone(self._ending.order) else []
        if self._lost_without():
            return self._end_unsaved("a part of the state was lost before it could be written", now)
        held = {rank: p for rank, p in self.members.by_rank().items() if p.may_hold_state}
        if self.members.dying() or any(p.name not in self._attempt.stopped for p in held.values()):
            return []
        reports = [self._attempt.stopped[p.name] for p in held.values()]
        absent = set(range(self.settings.world_size)) - {r.rank for r in reports if not r.blank}
        private = {rank: self.members.private_versions(rank) for rank in sorted(absent)}
        last = last_checkpoint(reports, private, self.shards, self.settings.world_size)
        if isinstance(last, str):
            return self._end_unsaved(last, now)
        self._deadline = now + SAVE_SECONDS
        order = Save(
            audience=Audience.MEMBERS,
            generation=self.generation,
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
        """Whether what a dead rank had for itself has gone with its agent since it was said what to write, and follows
        from rank and step. If it does not, the order stands: a successor may have it from whoever lives there."""
        needed = set(save.absent) - set(save.derived)
        gone = {rank for rank in needed if save.target not in self.members.private_versions(rank)}
        return bool(gone) and gone <= set(derived_ranks(tuple(self._attempt.stopped.values()), dict.fromkeys(gone, ())))

    def _on_saved(self, event: ev.Saved, now: float) -> list[Command]:
        if self.stage is not Stage.SAVING or self._ending.order is None or event.generation != self.generation:
            return []
        if event.error:
            return self._end_unsaved(event.error, now)
        self.job_stats.saved(event.version, event.path)
        text = f"A checkpoint of step {event.version} was saved as {event.path}: start the same command again to go on"
        return self._end(f"{self._ending.error}. {text}", now, self._ending.raised)

    def _on_save_timeout(self, now: float) -> list[Command]:
        if self._ending.order is not None:
            return self._end_unsaved(f"it was not done within {SAVE_SECONDS:g} s", now)
        late = self._late(now)
        out = [*self._blame_late(late, now), *self._lose(late, now)]
        if self.stage is Stage.SAVING and self._ending.order is None:
            left = (p.asked_at + self._attempt.stop_limit_seconds for p in self._moving())
            self._deadline = min(left, default=now + SAVE_SECONDS)
        return out

    def _moving(self) -> list[Process]:
        """Who was told to stand still, and has not said that it does; in a job that ends, of those who matter."""
        held = [p for p in self.members.by_rank().values() if p.name not in self._attempt.stopped]
        return held if self.stage is Stage.STOPPING else [p for p in held if p.may_hold_state]

    def _late(self, now: float) -> list[Process]:
        """Who has had all its time for it."""
        if self.stage is not Stage.STOPPING and (self.stage is not Stage.SAVING or self._ending.order is not None):
            return []
        return [p for p in self._moving() if p.asked_at + self._attempt.stop_limit_seconds <= now]

    def _blame_late(self, late: list[Process], now: float, evidence: str = "") -> list[Command]:
        evidence = evidence or f"did not stop within {self._attempt.stop_limit_seconds:g} s"
        for process in late:
            self.job_stats.failure(process, "hang", evidence, process.final_position, 0, self.generation, now)
        return [Kill(process=process.name, why=evidence) for process in late]

    def _end_unsaved(self, why: str, now: float) -> list[Command]:
        return self._end(f"{self._ending.error}. No last checkpoint was written: {why}", now, self._ending.raised)
