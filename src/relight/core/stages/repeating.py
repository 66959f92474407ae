"""Orders given again: to an agent that was restarted, and by a controller that was."""

from relight.core.job.draining import Draining
from relight.core.job.failing import COLLECTIVE_GRACE_SECONDS
from relight.core.job.job import Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.job.saving import Saving
from relight.core.job.shutdown import Shutdown
from relight.core.protocol.commands import (
    Assign,
    Begin,
    Command,
    Kill,
    Notice,
    Release,
    Resume,
    Spawn,
    StandingOrder,
)
from relight.core.stages.starting import Starting


class Repeating:
    """Orders given again after a death in the control plane. A process ignores an order that it has obeyed."""

    def __init__(
        self,
        job: Job,
        reserve: Reserve,
        starting: Starting,
        saving: Saving,
        shutdown: Shutdown,
        draining: Draining,
    ) -> None:
        self._job, self._reserve, self._starting = job, reserve, starting
        self._saving, self._shutdown, self._draining = saving, shutdown, draining
        self.standing_order: StandingOrder | None = None  # the newest order to all: it holds until the next one

    def to_agent(self, now: float) -> list[Command]:
        """Give the orders again that an agent may not have passed on before it died.

        Processes that it had not started are not repeated: the server reports them as ended.
        """
        job, why = self._job, "said again to an agent that was restarted"
        doomed = [p for p in job.members.processes.values() if p.is_to_die and not p.gone]
        out: list[Command] = [Kill(process=p.name, why=why) for p in doomed]
        out += self._ask_to_leave()
        for rank, process in job.members.by_rank().items():
            if process.replacement or (job.stage is Stage.STARTING and process.started):
                out.append(Assign(process=process.name, rank=rank, generation=job.generation, why=why))
        if anew := self._saving.save_once_still(now):
            return out + anew
        if self.standing_order is not None:
            out.append(self.standing_order)
        return [*out, *(self._pause_after_step() if job.stage is Stage.TRAINING else [])]

    def on_controller_restarted(self, now: float) -> list[Command]:
        """Give all orders again that hold: all events before the death are known, but not which orders arrived.

        A decision that was taken is not carried out (docs/PROTOCOL.md): a recovery begins again, in a new generation.
        Every wait begins anew: the time without a controller does not count.
        """
        job = self._job
        job.job_stats.controller_restarts += 1
        out = self._kill_and_spawn()
        if job.stage is Stage.STARTING:
            return out + self._starting.repeat(now)
        if job.stage is Stage.SAVING:  # as with a recovery; files that were written stay
            return out + self._saving.begin(now)
        why, buddies, writers = "again: the controller was restarted", job.buddies(), job.writers()
        generation = job.generation
        out.append(Begin(generation=generation, buddies=buddies, writers=writers, why=why))
        if job.stage is Stage.FINISHING:
            return [*out, Release(generation=generation, why=why)]
        if job.stage is not Stage.TRAINING:
            return out + self._recover_again(why, now)
        job.deadline = None if job.attempt.suspected_collective is None else now + COLLECTIVE_GRACE_SECONDS
        notice = Notice(why="the controller is back; training went on meanwhile", level="info")
        resume = Resume(
            generation=generation,
            buddies=buddies,
            writers=writers,
            doubts=job.job_stats.doubts.reasons,
            why=why,
        )
        return [*out, resume, *self._ask_to_leave(), *self._pause_after_step(), notice]

    def _kill_and_spawn(self) -> list[Command]:
        out: list[Command] = []
        for process in self._job.members.processes.values():
            if process.is_to_die:
                out.append(Kill(process=process.name, why="again: it was declared failed"))
            elif process.alive and not process.started:
                why = "again: the order may have been lost"
                out.append(
                    Spawn(agent=process.agent, process=process.name, rank=process.rank, slot=process.slot, why=why)
                )
        return out

    def _recover_again(self, why: str, now: float) -> list[Command]:
        job = self._job
        stop = job.stop_everyone("the controller died during the recovery, so it begins again", now)
        notice = Notice(why=f"the controller is back; {stop.why}, as generation {job.generation}", level="warning")
        out: list[Command] = [stop, notice]
        for rank, process in job.members.by_rank().items():
            if process.replacement:  # a standby that does not know its rank gets no Stop either
                out.append(Assign(process=process.name, rank=rank, generation=job.generation, why=why))
        return out + self._reserve.fill_vacancies(now)

    def _pause_after_step(self) -> list[Command]:
        """Repeat the order to pause after the next step, for the end of the job or for hosts that are drained."""
        return self._shutdown.wind_down() or self._draining.order()

    def _ask_to_leave(self) -> list[Command]:
        """Ask slow ranks again that have not made room for a standby yet."""
        held = self._job.members.by_rank().values()
        return [Kill(process=p.name, why=p.leaving, after_step=True) for p in held if p.leaving]
