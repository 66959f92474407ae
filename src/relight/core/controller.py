"""The controller's decisions: facts in, orders out, time as an argument. No sockets, no clock, no randomness.

    STARTING -> TRAINING -> FINISHING -> ENDED
                 |     ^
                 v     |
              STOPPING -> RESTORING        (a failure in either opens the next generation, from STOPPING)

    Of these three, if the job must end while its state is still held: -> SAVING -> ENDED

The shell around it (relight.server) calls `handle(event, now)`, `expire(now)` when `next_deadline()` has passed,
and carries out the commands in order. It journals each event and command first, so a journal can be replayed.
"""

from collections.abc import Mapping
from typing import assert_never

from relight.core import events as ev
from relight.core import waiting
from relight.core.commands import Audience, Begin, Command, Notice, Release, Restore, Resume, Save, Stop
from relight.core.fault import Fault
from relight.core.report import JobReport
from relight.core.stages.agents import Agents
from relight.core.stages.processes import Processes
from relight.core.stages.restoring import Restoring
from relight.core.stages.state import ControllerSettings, Stage
from relight.core.stages.training import Training

__all__ = ["Controller", "ControllerSettings", "Stage"]

HEARING_SECONDS = 1.0  # before a deadline counts, in case the controller was stopped until now: who answered is heard


class Controller(Agents, Processes, Training, Restoring):
    """One job. See the module's docstring for the calling convention; core/stages has the decisions, by stage."""

    # --- events ------------------------------------------------------------------------------------------------
    def handle(self, event: ev.Event, now: float) -> tuple[Command, ...]:
        """Take in one fact; return the orders it leads to, in the order in which they must be carried out."""
        if self.stage is Stage.ENDED:
            return ()
        self._note_version(event)
        match event:
            case ev.AgentJoined():
                out = self._on_agent_joined(event, now)
            case ev.ProcessStarted():
                out = self._on_started(event)
            case ev.ProcessDying():
                out = self._on_dying(event, now)
            case ev.ProcessExited():
                out = self._on_exited(event, now)
            case ev.ProcessSuspected():
                out = self._on_suspected(event, now)
            case ev.WorkerFailed():
                out = self._on_worker_failed(event, now)
            case ev.CollectiveFailed():
                out = self._on_collective_failed(event, now)
            case ev.RankSlow():
                out = self._on_rank_slow(event)
            case ev.StateDiffers():
                out = self._on_state_differs(event, now)
            case ev.CommunicationStalled():
                out = self._on_stalled(event, now)
            case ev.AgentLost():
                out = self._on_agent_lost(event, now)
            case ev.TrainingEntered():
                out = self._on_entered(event, now)
            case ev.StandbyReady():
                out = self._on_standby_ready(event, now)
            case ev.Stopped():
                out = self._on_stopped(event, now)
            case ev.Restored():
                out = self._on_restored(event, now)
            case ev.RestoreFailed():
                out = self._on_restore_failed(event, now)
            case ev.StepResumed():
                out = self._on_step_resumed(event, now)
            case ev.Saved():
                out = self._on_saved(event, now)
            case ev.TrainingDone():
                out = self._on_done(event, now)
            case ev.WorkerReleased():
                self._released.add(event.process)
                out = []
            case ev.WorkerNotice():
                out = [Notice(why=event.text, level="warning")] if self.job_stats.notice(event.text) else []
            case ev.BitsDoubted():
                out = self._on_doubt(event)
            case ev.FaultStruck():
                self.job_stats.struck.add(event.fault)
                out = []
            case ev.ControllerRestarted():
                out = self._on_controller_restarted(now)
            case ev.ShutdownRequested():
                out = self._on_shutdown(event, now)
            case _:
                assert_never(event)
        return self._given(out)

    def _on_doubt(self, event: ev.BitsDoubted) -> list[Command]:
        if not self.job_stats.doubts.add(event.rank, event.step, event.reason, event.process):
            return []
        why = f"the bits may differ from those of an undisturbed run: rank {event.rank}: {event.reason}"
        return [Notice(why=why, level="warning")]

    def _note_version(self, event: ev.Event) -> None:
        """How far the job got is part of its account, however it ends."""
        match event:
            case ev.ProcessDying() | ev.ProcessExited() | ev.ProcessSuspected():
                self.job_stats.committed(event.position.version, event.position.generation)
            case ev.Stopped() if not event.blank:
                self.job_stats.committed(event.version, event.generation - 1)
            case ev.AgentLost() | ev.ShutdownRequested():
                self.job_stats.committed(event.version)
            case ev.WorkerFailed() if self.stage is Stage.TRAINING:
                self.job_stats.committed(event.step)  # it was in this step: those before it are done
            case ev.Saved() if event.generation == self.generation and not event.error:
                self.job_stats.committed(event.version)
            case ev.StepResumed() if event.generation == self.generation:
                self.job_stats.committed(event.step + 1)

    def expire(self, now: float) -> tuple[Command, ...]:
        """The deadline has passed: whoever was waited for has failed too, or the grace is over."""
        out = self._given(self._on_next_attempt(now))
        if out or self._deadline is None or now < self._deadline or self.stage is Stage.ENDED:
            return out
        overslept = now - self._deadline > HEARING_SECONDS
        if (overslept or self._somebody_pays(now)) and self._deadline != self._extended:
            # Perhaps nobody looked until just now, and whoever is waited for has answered meanwhile.
            self._deadline = self._extended = now + HEARING_SECONDS
            return ()
        self._deadline = None
        if self.stage is Stage.STARTING:
            return self._given(self._on_startup_timeout(now))
        if self.stage is Stage.TRAINING:
            return self._given(self._on_grace_over(now))
        if self.stage is Stage.STOPPING:
            return self._given(self._on_stop_timeout(now))
        if self.stage is Stage.RESTORING:
            return self._given(self._on_restore_timeout(now))
        if self.stage is Stage.SAVING:
            return self._given(self._on_save_timeout(now))
        return ()

    def _somebody_pays(self, now: float) -> bool:
        """Whether a process is killed, or the job ends, if nothing is heard. Then a second more does not matter, and a
        controller that was stopped until just after the deadline must not take itself for punctual."""
        return self.stage in (Stage.STARTING, Stage.SAVING) or bool(self._late(now))

    def next_deadline(self) -> float | None:
        """When `expire` wants to be called, or None."""
        if self._next_attempt is None or self._deadline is None:
            return self._next_attempt if self._deadline is None else self._deadline
        return min(self._deadline, self._next_attempt)

    def _on_next_attempt(self, now: float) -> list[Command]:
        """What was put off, since several attempts in a row had failed, begins now."""
        if self._next_attempt is None or now < self._next_attempt or self.stage is Stage.ENDED:
            return []
        self._next_attempt = None
        if self.stage is Stage.STOPPING:
            return self._advance(now)
        settled = self.stage in (Stage.STARTING, Stage.TRAINING) and not self._to_resume
        return self._top_up_standbys(now) if settled else []

    def _given(self, commands: list[Command]) -> tuple[Command, ...]:
        """Keep the newest order to all: it holds until the next one."""
        for command in commands:
            if isinstance(command, Begin | Stop | Restore | Resume | Save | Release):
                self._standing_order = command
        return tuple(commands)

    # --- what the shell and people look at --------------------------------------------------------------------
    def audience(self, audience: Audience) -> tuple[str, ...]:
        """Names of the processes that a command of this audience goes to, now."""
        return self.members.audience(audience)

    def rank_processes(self) -> Mapping[int, str]:
        """Rank to process name, in the order of ranks."""
        return self.members.names_by_rank()

    def rank_hosts(self) -> Mapping[int, str]:
        """Rank to the name of the agent that runs it."""
        return {rank: process.agent for rank, process in self.members.by_rank().items()}

    @property
    def is_winding_down(self) -> bool:
        """Whether the job is to end after its next step, or after a last checkpoint."""
        return bool(self._winding_down) or self.stage is Stage.SAVING

    @property
    def saving(self) -> Save | None:
        """The order to write a last checkpoint, once it is given."""
        return self._ending.order

    @property
    def standbys_ready(self) -> int:
        """Warm standbys."""
        return len(self.members.ready_standbys())

    @property
    def predecessors(self) -> dict[int, tuple[str, ...]]:
        """For each rank, its failed holders since it was last restored, newest last."""
        return self.members.predecessors

    @property
    def faults_struck(self) -> frozenset[Fault]:
        """Planned faults that happened."""
        return frozenset(self.job_stats.struck)

    def report(self) -> JobReport:
        """The report so far."""
        return self.job_stats.report()

    def waiting(self, now: float) -> str:
        """Whom the job waits for, and why, in words; empty while it trains."""
        members, settings = self.members, self.settings
        if self.stage is Stage.STOPPING and now < self._backoff.until:
            limit = settings.max_failed_attempts
            return waiting.for_next_attempt(members, settings.world_size, self._backoff, limit, now)
        match self.stage:
            case Stage.STARTING:
                return waiting.for_first_step(members, self._entered, len(self.hosts), settings.nodes, now)
            case Stage.STOPPING:
                return waiting.to_decide(members, self._attempt.stopped, settings.world_size, now)
            case Stage.RESTORING:
                return waiting.to_resume(members, self._attempt.restored, self.job_stats.decided_at, now)
            case Stage.SAVING:
                return "the job must end: a last checkpoint is written"
            case Stage.FINISHING:
                return waiting.for_ends(members)
        return ""

    def check(self) -> None:
        """Assert what must always hold."""
        assert self.generation >= 1
        ranks = [p.rank for p in self.members.processes.values() if p.rank is not None and p.alive and not p.failed]
        assert len(ranks) == len(set(ranks)), f"two live processes hold one rank: {sorted(ranks)}"
        assert sorted(ranks) == list(self.members.by_rank()), "who holds which rank is kept wrongly"
        reserve = [p for p in self.members.processes.values() if p.rank is None and p.alive and not p.failed]
        assert reserve == self.members.standbys(), "who is in reserve is kept wrongly"
        assert self.stage is not Stage.RESTORING or self._attempt.decision is not None
