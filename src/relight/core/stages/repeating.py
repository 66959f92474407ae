"""Orders said again, to an agent that was restarted and by a controller that was."""

from relight.core.commands import Assign, Audience, Begin, Command, Kill, Notice, Release, Resume, Spawn
from relight.core.stages.failing import COLLECTIVE_GRACE_SECONDS, Failing
from relight.core.stages.state import Stage


class Repeating(Failing):
    """After a death in the control plane."""

    def _repeat_orders(self, now: float) -> list[Command]:
        """What an agent had not passed on when it died is lost. Who has an order already ignores it the second time.

        Processes that it had not started are not repeated: the server reports them as ended.
        """
        why = "said again to an agent that was restarted"
        doomed = [p for p in self.members.processes.values() if p.is_to_die and not p.gone]
        out: list[Command] = [Kill(process=p.name, why=why) for p in doomed]
        out += self._ask_to_leave()
        for rank, process in self.members.by_rank().items():
            if process.replacement or (self.stage is Stage.STARTING and process.started):
                out.append(Assign(process=process.name, rank=rank, generation=self.generation, why=why))
        if anew := self._save_once_still(now):
            return out + anew
        if self._standing_order is not None:
            out.append(self._standing_order)
        return [*out, *(self._wind_down() if self.stage is Stage.TRAINING else [])]

    def _on_controller_restarted(self, now: float) -> list[Command]:
        """Everything that the dead controller was told is known, but not which of its orders arrived.

        So the orders that still hold are given again: whoever has obeyed one already takes no notice. An unfinished
        decision is not gone on with (rule 12 of docs/PROTOCOL.md): a recovery begins again, in a new generation.
        Whoever is waited for gets all of the time again: the time without a controller was nobody's fault.
        """
        self.job_stats.controller_restarts += 1
        out: list[Command] = []
        for process in self.members.processes.values():
            if process.is_to_die:
                out.append(Kill(process=process.name, why="again: it was declared failed"))
            elif process.alive and not process.started:
                why = "again: the order may have been lost"
                out.append(
                    Spawn(agent=process.agent, process=process.name, rank=process.rank, slot=process.slot, why=why)
                )
        if self.stage is Stage.STARTING:
            return out + self._start_again(now)
        if self.stage is Stage.SAVING:  # as with a recovery; whoever has written its files finds them there
            return out + self._begin_saving(now)
        why = "again: the controller was restarted"
        buddies, writers = self._buddies(), self._writers()
        out.append(
            Begin(audience=Audience.MEMBERS, generation=self.generation, buddies=buddies, writers=writers, why=why)
        )
        if self.stage is Stage.FINISHING:
            return [*out, Release(audience=Audience.MEMBERS, generation=self.generation, why=why)]
        if self.stage is Stage.TRAINING:
            self._deadline = None if self._attempt.suspected_collective is None else now + COLLECTIVE_GRACE_SECONDS
            notice = Notice(why="the controller is back; training went on meanwhile", level="info")
            resume = Resume(
                audience=Audience.MEMBERS,
                generation=self.generation,
                buddies=buddies,
                writers=writers,
                doubts=self.job_stats.doubts.reasons,
                why=why,
            )
            return [*out, resume, *self._ask_to_leave(), *self._wind_down(), notice]
        stop = self._stop_everyone("the controller died during the recovery, so it begins again", now)
        notice = Notice(why=f"the controller is back; {stop.why}, as generation {self.generation}", level="warning")
        out += [stop, notice]
        for rank, process in self.members.by_rank().items():
            if process.replacement:  # a standby that has never heard of its rank hears no Stop either
                out.append(Assign(process=process.name, rank=rank, generation=self.generation, why=why))
        return out + self._fill_vacancies(now)

    def _ask_to_leave(self) -> list[Command]:
        """Slow ranks that were to make room for a standby, and have not yet."""
        held = self.members.by_rank().values()
        return [Kill(process=p.name, why=p.leaving, after_step=True) for p in held if p.leaving]

    def _start_again(self, now: float) -> list[Command]:
        """Of a job that has not begun to train."""
        if not len(self.hosts):
            return []
        self._deadline = now + self.settings.startup_timeout_seconds
        return [
            Assign(process=process.name, rank=rank, generation=self.generation, why="again: initial rank")
            for rank, process in self.members.by_rank().items()
            if process.started
        ]
