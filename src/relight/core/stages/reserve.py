"""Standbys and vacant ranks: who is started where, who waits, who takes a rank that nobody holds."""

from relight.core import events as ev
from relight.core.backoff import LONGEST_PAUSE_SECONDS, SAID_AGAIN_AFTER
from relight.core.commands import Assign, Command, Kill, Notice, Spawn
from relight.core.members import Process
from relight.core.stages.state import Stage, State

MAX_EQUAL_ERRORS = 3  # of the script, in standbys: then none can be started
# A standby that takes longer than this, and than twice the slowest start of this job, may never be warm: start another
# beside it.
STANDBY_PATIENCE_SECONDS = 30.0


class Reserve(State):
    """In any stage."""

    def _spawn(self, rank: int | None, place: tuple[str, int], now: float, *, why: str, fresh: bool = False) -> Spawn:
        agent, slot = place
        process = self.members.add(agent, slot, rank, now, fresh=fresh)
        return Spawn(agent=process.agent, process=process.name, rank=rank, slot=slot, why=why)

    def _place(self) -> tuple[str, int]:
        return self.hosts.place(self.members.processes.values())

    def _top_up_standbys(self, now: float) -> list[Command]:
        """Keep as many standbys as were asked for, warm or on their way."""
        if self._standbys_are_useless or not len(self.hosts) or self.stage is Stage.SAVING:
            return []
        missing = self.settings.standbys - len(self.members.standbys())
        if missing <= 0 or self._is_put_off(now):
            return []
        return [self._spawn(None, self._place(), now, why="a standby in reserve") for _ in range(missing)]

    def _on_standby_ready(self, event: ev.StandbyReady, now: float) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or process.rank is not None or process.failed:
            return []
        process.ready, process.ready_at = True, now
        self._slowest_start_seconds = max(self._slowest_start_seconds, now - process.spawned_at)
        if self.stage is Stage.STOPPING:
            return self._fill_vacancies(now)
        return self._surplus() if self.stage is Stage.TRAINING else []

    def _fill_vacancies(self, now: float) -> list[Command]:
        """Give vacant ranks to warm standbys; see that enough processes are on their way for the rest."""
        out: list[Command] = []
        vacant = list(self.members.vacant(self.settings.world_size))
        for standby, rank in self._pair(self.members.ready_standbys(), vacant):
            vacant.remove(rank)
            self.members.take_rank(standby, rank, now)
            what = "a fresh process" if standby.fresh else f"standby {standby.name}"
            out.append(
                Assign(
                    process=standby.name,
                    rank=rank,
                    generation=self.generation,
                    why=f"{what} takes the place of rank {rank}",
                )
            )
        coming = [p for p in self.members.standbys() if now - p.spawned_at < self._patience_seconds]
        lacking = vacant[len(coming) :]
        for rank in [] if lacking and self._is_put_off(now) else lacking:
            out.append(
                self._spawn(
                    None, self._place(), now, why=f"no standby is left for rank {rank}: a fresh process", fresh=True
                )
            )
        if vacant:
            self._deadline = now + min(self._patience_seconds, self._attempt.stop_limit_seconds)
        return out

    def _pair(self, standbys: list[Process], vacant: list[int]) -> list[tuple[Process, int]]:
        """Who takes which rank: one on the lost holder's own host if there is one, since private state lies there.

        But not if it was that host, perhaps, which was slow.
        """
        pairs: list[tuple[Process, int]] = []
        free, ranks = list(standbys), list(vacant)
        for rank in vacant:
            before = self.members.predecessors.get(rank, ())
            last = self.members.processes[before[-1]] if before else None
            if last is None:
                continue
            near = next((standby for standby in free if (standby.agent == last.agent) != bool(last.leaving)), None)
            if near is not None:
                pairs.append((near, rank))
                free.remove(near)
                ranks.remove(rank)
        return pairs + list(zip(free, ranks, strict=False))

    # --- attempts that fail -------------------------------------------------------------------------------------
    @property
    def _standbys_are_useless(self) -> bool:
        """The script has raised the same in them again and again: a bug of the script, not a failure."""
        return any(count >= MAX_EQUAL_ERRORS for count in self._standby_errors.values())

    def _is_put_off(self, now: float) -> bool:
        """Whether the next attempt must wait, since several in a row have failed; it then begins by itself."""
        if now >= self._backoff.until:
            return False
        self._next_attempt = self._backoff.until
        return True

    def _note_failed_attempt(self, begun_at: float, what: str, now: float) -> list[Command]:
        """A replacement was lost before it was of use, or could not be restored: perhaps the next one waits."""
        if not self._backoff.fail(begun_at, now, what):
            return []
        seconds = self._backoff.until - now
        if not seconds:
            return []
        limit = self.settings.max_failed_attempts
        until = "as long as an intact replica is left" if limit is None else f"{limit} times at most"
        text = (
            f"{self._backoff.failed} attempts in a row to start or restore a process have failed within "
            f"{now - self._backoff.since:.0f} s (the last: {what}); the next begins in {seconds:g} s, each later one "
            f"after twice the time, at most {LONGEST_PAUSE_SECONDS:g} s, {until} (--max-failed-attempts)"
        )
        said = self._said_of_attempts
        self._said_of_attempts = True
        if said and self._backoff.failed % SAID_AGAIN_AFTER:
            return []
        self.job_stats.notice(text)
        return [Notice(why=text, level="warning")]

    def _attempts_used_up(self) -> str:
        """Why no more are made, if the user has set a limit and it is reached; or an empty string."""
        limit = self.settings.max_failed_attempts
        if limit is None or self._backoff.failed < limit:
            return ""
        return (
            f"{self._backoff.failed} attempts in a row to start or restore a process have failed "
            f"(--max-failed-attempts {limit})"
        )

    def _note_success(self) -> None:
        self._backoff.succeed()
        self._next_attempt = None
        self._said_of_attempts = False

    @property
    def _patience_seconds(self) -> float:
        return max(STANDBY_PATIENCE_SECONDS, 2 * self._slowest_start_seconds)

    def _surplus(self) -> list[Command]:
        """A fresh process that got warm after its rank was taken by another is one standby too many."""
        worst_first = sorted(self.members.standbys(), key=lambda p: (p.ready, -p.spawned_at))
        out: list[Command] = []
        for process in worst_first[: max(0, len(worst_first) - self.settings.standbys)]:
            self.members.fail(process)
            out.append(Kill(process=process.name, why="a replacement that is no longer needed"))
        return out
