"""Standbys and vacant ranks: where processes are started, and which standby takes which rank."""

from relight.core.job.attempts import Attempts
from relight.core.job.job import Job, Stage
from relight.core.membership.members import Process
from relight.core.membership.recent import Recent
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Assign, Command, Kill, Notice, Spawn

MAX_EQUAL_ERRORS = 3  # of the script, in standbys: then none can be started
# A standby that takes longer than this, and than twice the slowest start of this job, may never be warm: start another
# beside it.
STANDBY_PATIENCE_SECONDS = 30.0


class Reserve:
    """Processes without a rank, in any stage."""

    def __init__(self, job: Job, attempts: Attempts) -> None:
        self._job, self._attempts = job, attempts
        self._slowest_start_seconds = 0.0
        self._errors: Recent[str] = Recent()  # exceptions of scripts in standbys, since a standby took a rank

    # --- standbys -----------------------------------------------------------------------------------------------
    def spawn(self, rank: int | None, place: tuple[str, int], now: float, *, why: str, fresh: bool = False) -> Spawn:
        """Start a process on `place`, a host and a slot."""
        agent, slot = place
        process = self._job.members.add(agent, slot, rank, now, fresh=fresh)
        return Spawn(agent=process.agent, process=process.name, rank=rank, slot=slot, why=why)

    def top_up(self, now: float) -> list[Command]:
        """Keep as many standbys as were asked for, warm or starting. At the start, they wait for spare hosts."""
        job = self._job
        if self.is_useless or not len(job.hosts) or job.stage is Stage.SAVING or job.awaits_spares:
            return []
        missing = max(0, job.wanted_standbys - len(self._lasting()))
        moves = self._crowded()
        if not (missing or moves) or self._attempts.is_put_off(now):
            return []
        out: list[Command] = [self.spawn(None, self._place(), now, why="a standby in reserve") for _ in range(missing)]
        for crowded in moves[: self._inviting_slots()]:
            fault = job.hosts.why_avoided(crowded.agent)
            where = f"is on {crowded.agent}, which {fault}" if fault else f"shares a slot on {crowded.agent}"
            why = f"a standby in reserve, instead of {crowded.name}, which {where}"
            out.append(self.spawn(None, self._place(), now, why=why))
            next(reversed(job.members.processes.values())).instead_of = crowded.name
        return out

    def _lasting(self) -> list[Process]:
        """The standbys, without those that have yet to take the place of another one."""
        standbys = self._job.members.standbys()
        names = {standby.name for standby in standbys}
        return [standby for standby in standbys if standby.instead_of not in names]

    def _crowded(self) -> list[Process]:
        """The standbys that are to move to another host as soon as there is room. It costs a look at all processes, so
        it is done only if there may be room."""
        job = self._job
        if len(job.hosts) == 1 or not self._inviting_slots():
            return []
        moving = {standby.instead_of for standby in job.members.standbys()}
        return [p for p in job.hosts.crowded(job.members.processes.values()) if p.name not in moving]

    def _inviting_slots(self) -> int:
        return self._job.hosts.inviting_slots(self._job.members.processes.values())

    def on_standby_ready(self, event: ev.StandbyReady, now: float) -> list[Command]:
        """A standby is warm: it takes a vacant rank at once."""
        process = self._job.members.processes.get(event.process)
        if process is None or process.rank is not None or process.failed:
            return []
        process.ready, process.ready_at = True, now
        self._slowest_start_seconds = max(self._slowest_start_seconds, now - process.spawned_at)
        if self._job.stage is Stage.STOPPING:
            return self.fill_vacancies(now)
        if self._job.stage is not Stage.TRAINING:
            return []
        return [*self._replace_crowded(process), *self.surplus()]

    def _replace_crowded(self, standby: Process) -> list[Command]:
        """End the standby that shares a slot, now that another one is warm in its stead."""
        members = self._job.members
        crowded = next((p for p in members.standbys() if p.name == standby.instead_of), None)
        if crowded is None:
            return []
        members.fail(crowded)
        return [Kill(process=crowded.name, why="another standby, on a host with room, is warm: it is no longer needed")]

    def surplus(self) -> list[Command]:
        """End standbys beyond the number asked for: fresh processes whose rank another one took in the meantime."""
        members, wanted = self._job.members, self._job.wanted_standbys
        worst_first = sorted(self._lasting(), key=lambda p: (p.ready, -p.spawned_at))
        out: list[Command] = []
        for process in worst_first[: max(0, len(worst_first) - wanted)]:
            members.fail(process)
            out.append(Kill(process=process.name, why="a replacement that is no longer needed"))
        return out

    def end_all(self) -> list[Command]:
        """Kill every standby: training has finished."""
        out: list[Command] = []
        for standby in self._job.members.standbys():
            self._job.members.fail(standby)
            out.append(Kill(process=standby.name, why="training finished"))
        return out

    # --- vacant ranks -------------------------------------------------------------------------------------------
    def fill_vacancies(self, now: float) -> list[Command]:
        """Give vacant ranks to warm standbys; start enough processes for the rest."""
        job, out = self._job, list[Command]()
        vacant = list(job.members.vacant(job.settings.world_size))
        for standby, rank in self._pair(job.members.ready_standbys(), vacant):
            vacant.remove(rank)
            job.members.take_rank(standby, rank, now)
            kind = "a fresh process" if standby.fresh else f"standby {standby.name}"
            why = f"{kind} takes the place of rank {rank}"
            out.append(Assign(process=standby.name, rank=rank, generation=job.generation, why=why))
        coming = [p for p in job.members.standbys() if now - p.spawned_at < self.patience_seconds]
        lacking = vacant[len(coming) :]
        for rank in [] if lacking and self._attempts.is_put_off(now) else lacking:
            why = f"no standby is left for rank {rank}: a fresh process"
            out.append(self.spawn(None, self._place(), now, why=why, fresh=True))
        if vacant:
            job.deadline = now + min(self.patience_seconds, job.attempt.stop_limit_seconds)
        return out

    def _pair(self, standbys: list[Process], vacant: list[int]) -> list[tuple[Process, int]]:
        """Choose the standby of each rank: one on the lost holder's host if possible, since private state lies there.

        Not if the holder was asked to leave because it was slow: that may be its host's fault. Nor if that host is to
        be avoided; standbys on such hosts come last.
        """
        members, is_unreliable = self._job.members, self._job.hosts.is_unreliable
        pairs: list[tuple[Process, int]] = []
        free, ranks = sorted(standbys, key=lambda standby: is_unreliable(standby.agent)), list(vacant)
        for rank in vacant:
            before = members.predecessors.get(rank, ())
            last = members.processes[before[-1]] if before else None
            if last is None:
                continue
            apart = bool(last.leaving) or is_unreliable(last.agent)
            near = next((standby for standby in free if (standby.agent == last.agent) != apart), None)
            if near is not None:
                pairs.append((near, rank))
                free.remove(near)
                ranks.remove(rank)
        return pairs + list(zip(free, ranks, strict=False))

    def _place(self) -> tuple[str, int]:
        return self._job.hosts.place(self._job.members.processes.values())

    # --- standbys that fail -------------------------------------------------------------------------------------
    def note_error(self, summary: str) -> list[Command]:
        """Count an exception that the script raised in a standby."""
        self._errors.add(summary)
        if self._errors[summary] != MAX_EQUAL_ERRORS:
            return []
        text = f"no more standbys are started: the script raised the same in {MAX_EQUAL_ERRORS} of them"
        return [Notice(why=text, level="warning")]

    def forget_errors(self) -> None:
        """Note that a standby was of use."""
        self._errors.clear()

    @property
    def is_useless(self) -> bool:
        """True if the script has raised the same in standbys again and again: a bug of the script, not a failure."""
        return any(count >= MAX_EQUAL_ERRORS for count in self._errors.values())

    @property
    def patience_seconds(self) -> float:
        """Time after which a standby that is still starting is not counted on."""
        return max(STANDBY_PATIENCE_SECONDS, 2 * self._slowest_start_seconds)

    def note_start(self, seconds: float) -> None:
        """Remember the time that the slowest initial rank took to start."""
        self._slowest_start_seconds = seconds
