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
from dataclasses import dataclass

from relight.core.account.job_stats import JobStats
from relight.core.account.report import JobReport
from relight.core.job import waiting
from relight.core.job.attempts import Attempts
from relight.core.job.draining import Draining
from relight.core.job.failing import Failing
from relight.core.job.job import ControllerSettings, Job, Stage
from relight.core.job.reserve import Reserve
from relight.core.job.saving import Saving
from relight.core.job.shutdown import Shutdown
from relight.core.job.supplying import Supplying
from relight.core.membership.members import Members
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, EndJob, Save, StandingOrder
from relight.core.protocol.fault import Fault
from relight.core.recovery.coverage import Coverage
from relight.core.stages.agents import Agents
from relight.core.stages.deciding import Deciding
from relight.core.stages.finishing import Finishing
from relight.core.stages.processes import Processes
from relight.core.stages.repeating import Repeating
from relight.core.stages.restoring import Restoring
from relight.core.stages.starting import Starting
from relight.core.stages.stopping import Stopping
from relight.core.stages.training import Training

__all__ = ["Controller", "ControllerSettings", "Kinds", "Stage"]

HEARING_SECONDS = 1.0  # before a deadline counts, in case the controller was stopped until now: answers are read first


@dataclass(frozen=True)
class Kinds:
    """The classes of a controller's parts. The simulator replaces one of them to plant a bug."""

    job: type[Job] = Job
    attempts: type[Attempts] = Attempts
    reserve: type[Reserve] = Reserve
    starting: type[Starting] = Starting
    saving: type[Saving] = Saving
    failing: type[Failing] = Failing
    deciding: type[Deciding] = Deciding
    stopping: type[Stopping] = Stopping
    shutdown: type[Shutdown] = Shutdown
    draining: type[Draining] = Draining
    supplying: type[Supplying] = Supplying
    restoring: type[Restoring] = Restoring
    training: type[Training] = Training
    finishing: type[Finishing] = Finishing
    processes: type[Processes] = Processes
    repeating: type[Repeating] = Repeating
    agents: type[Agents] = Agents


PRODUCTION = Kinds()


class Controller:
    """One job. See the module's docstring for the calling convention; core/stages has the decisions, by stage."""

    def __init__(self, settings: ControllerSettings, *, full_account: bool = False, kinds: Kinds = PRODUCTION) -> None:
        """`full_account`: keep every failure and recovery, for a report or a page, and not only the newest."""
        self.settings = settings
        self.kinds = kinds
        self.job = job = kinds.job(settings, full_account=full_account)
        self.attempts = kinds.attempts(job)
        self.reserve = kinds.reserve(job, self.attempts)
        self.starting = kinds.starting(job, self.reserve)
        self.saving = kinds.saving(job)
        self.failing = kinds.failing(job, self.attempts, self.reserve, self.saving)
        self.deciding = kinds.deciding(job)
        self.stopping = kinds.stopping(job, self.attempts, self.reserve, self.saving, self.failing, self.deciding)
        self.shutdown = kinds.shutdown(job, self.saving)
        self.draining = kinds.draining(job, self.reserve)
        self.supplying = kinds.supplying(job, self.draining)
        self.restoring = kinds.restoring(
            *(job, self.attempts, self.reserve, self.saving, self.failing, self.shutdown, self.draining)
        )
        self.training = kinds.training(job, self.failing, self.restoring)
        self.finishing = kinds.finishing(job, self.reserve, self.failing, self.shutdown, self.draining)
        self.processes = kinds.processes(
            *(job, self.attempts, self.reserve, self.starting),
            *(self.saving, self.failing, self.stopping, self.finishing),
        )
        self.repeating = kinds.repeating(job, self.reserve, self.starting, self.saving, self.shutdown, self.draining)
        self.agents = kinds.agents(
            *(job, self.reserve, self.starting, self.failing, self.stopping, self.restoring),
            *(self.finishing, self.repeating, self.shutdown, self.draining),
        )
        self._extended: float | None = None  # the deadline that was put off, once, by HEARING_SECONDS

    # --- events -------------------------------------------------------------------------------------------------
    def handle(self, event: ev.Event, now: float) -> tuple[Command, ...]:
        """Take in one fact; return the orders it leads to, in the order in which they must be carried out."""
        if self.job.stage is Stage.ENDED:
            return ()
        self.job.note_version(event)
        return self._given(self._on_event(event, now), now)

    def _on_event(self, event: ev.Event, now: float) -> list[Command]:
        """The handler of each event. Every one begins by asking whether the event matters in the job's stage."""
        match event:
            case ev.AgentJoined():
                return self.agents.on_joined(event, now)
            case ev.AgentLost():
                return self.agents.on_lost(event, now)
            case ev.HostDraining():
                return self.agents.on_draining(event, now)
            case ev.HostFaulty():
                return self.agents.on_faulty(event, now)
            case ev.HostOrdered() | ev.HostWaits() | ev.HostRefused() | ev.HostCancelled():
                return self.supplying.on_answer(event, now)
            case ev.ProcessStarted():
                return self.starting.on_started(event)
            case ev.ProcessDying():
                return self.processes.on_dying(event, now)
            case ev.ProcessExited():
                return [*self.processes.on_exited(event, now), *self.draining.advance(now)]
            case ev.ProcessSuspected():
                return self.processes.on_suspected(event, now)
            case ev.WorkerFailed():
                return self.processes.on_worker_failed(event, now)
            case ev.StandbyReady():
                return [*self.reserve.on_standby_ready(event, now), *self.draining.advance(now)]
            case ev.TrainingEntered():
                return self.starting.on_entered(event, now)
            case ev.CollectiveFailed():
                return self.training.on_collective_failed(event, now)
            case ev.CommunicationStalled():
                return self.training.on_stalled(event, now)
            case ev.StateDiffers():
                return self.training.on_state_differs(event, now)
            case ev.RankSlow():
                return self.training.on_rank_slow(event)
            case ev.Stopped():
                return self.stopping.on_stopped(event, now)
            case ev.Restored():
                return self.restoring.on_restored(event, now)
            case ev.RestoreFailed():
                return self.restoring.on_restore_failed(event, now)
            case ev.StepResumed():
                return self.restoring.on_step_resumed(event, now)
            case ev.Saved():
                return self.saving.on_saved(event, now)
            case ev.TrainingDone():
                return self.finishing.on_done(event, now)
            case ev.WorkerReleased():
                return self.finishing.on_released(event)
            case ev.ControllerRestarted():
                return [*self.repeating.on_controller_restarted(now), *self.supplying.repeat()]
            case ev.ShutdownRequested():
                return self.shutdown.on_shutdown(event, now)
            case ev.WorkerNotice():
                return self.job.on_notice(event)
            case ev.BitsDoubted():
                return self.job.on_doubt(event)
            case ev.FaultStruck():
                return self.job.on_fault_struck(event)

    def _on_deadline(self, now: float) -> list[Command]:
        """The handler of each stage's deadline."""
        match self.job.stage:
            case Stage.STARTING:
                return self.starting.on_startup_timeout(now)
            case Stage.TRAINING:
                return self.training.on_grace_over(now)
            case Stage.STOPPING:
                return self.stopping.on_stop_timeout(now)
            case Stage.RESTORING:
                return self.restoring.on_restore_timeout(now)
            case Stage.SAVING:
                return self.saving.on_save_timeout(now)
            case Stage.FINISHING | Stage.ENDED:
                return []

    # --- time ---------------------------------------------------------------------------------------------------
    def next_deadline(self) -> float | None:
        """Return the time at which `expire` wants to be called, or None."""
        if self.job.stage is Stage.ENDED:
            return None
        moments = (self.job.deadline, self.attempts.next_at, self.supplying.next_at())
        return min((at for at in moments if at is not None), default=None)

    def expire(self, now: float) -> tuple[Command, ...]:
        """The deadline has passed: a rank that was waited for has failed too, or the time for a death is over."""
        job, out = self.job, self._given(self._on_next_attempt(now), now)
        if out or job.deadline is None or now < job.deadline or job.stage is Stage.ENDED:
            return out
        overslept = now - job.deadline > HEARING_SECONDS
        if (overslept or self._is_costly(now)) and job.deadline != self._extended:
            # The controller may have been stopped until just now, with answers unread.
            job.deadline = self._extended = now + HEARING_SECONDS
            return ()
        job.deadline = None
        return self._given(self._on_deadline(now), now)

    def _is_costly(self, now: float) -> bool:
        """True if the deadline kills a process or ends the job. Then one more second does not matter, and a controller
        that was stopped until just after the deadline must not take itself for punctual."""
        return self.job.stage in (Stage.STARTING, Stage.SAVING) or bool(self.saving.late(now))

    def _on_next_attempt(self, now: float) -> list[Command]:
        """Begin the attempt that was put off, since several in a row had failed."""
        if self.attempts.next_at is None or now < self.attempts.next_at or self.job.stage is Stage.ENDED:
            return []
        self.attempts.next_at = None
        if self.job.stage is Stage.STOPPING:
            return self.stopping.advance(now)
        return self.reserve.top_up(now) if self.restoring.is_settled else []

    def _given(self, commands: list[Command], now: float) -> tuple[Command, ...]:
        """Keep the newest order to all: it holds until the next one. Add what is to be done about the supply of hosts.

        At the end of the job, orders for hosts are cancelled right before it: not earlier, since until then processes
        may be started on their hosts.
        """
        for command in commands:
            if isinstance(command, StandingOrder):
                self.repeating.standing_order = command
        supply = self.supplying.advance(now)
        end = next((n for n, command in enumerate(commands) if isinstance(command, EndJob)), len(commands))
        return (*commands[:end], *supply, *commands[end:])

    # --- for the shell and for people ---------------------------------------------------------------------------
    @property
    def stage(self) -> Stage:
        """The stage of the job."""
        return self.job.stage

    @property
    def generation(self) -> int:
        """The number of the newest generation."""
        return self.job.generation

    @property
    def members(self) -> Members:
        """The job's processes."""
        return self.job.members

    @property
    def job_stats(self) -> JobStats:
        """The account of the job."""
        return self.job.job_stats

    @property
    def ended(self) -> EndJob | None:
        """The end of the job, once it has ended."""
        return self.job.ended

    @property
    def coverage(self) -> Coverage | None:
        """The losses that a divided state survives, once training has begun."""
        return self.job.coverage

    @property
    def saving_order(self) -> Save | None:
        """The order to write a last checkpoint, once it is given."""
        return self.saving.order

    def rank_processes(self) -> Mapping[int, str]:
        """Rank to process name, in the order of ranks."""
        return self.members.names_by_rank()

    def rank_hosts(self) -> Mapping[int, str]:
        """Rank to the name of the agent that runs it."""
        return {rank: process.agent for rank, process in self.members.by_rank().items()}

    @property
    def is_winding_down(self) -> bool:
        """True if the job is to end after its next step, or after a last checkpoint."""
        return bool(self.shutdown.reason) or self.stage is Stage.SAVING

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
        """Describe the ranks that the job waits for, and why; empty while it trains."""
        return waiting.describe(self.job, self.starting.entered, self.attempts.backoff, now)

    def check(self) -> None:
        """Assert what must always hold."""
        assert self.generation >= 1
        ranks = [p.rank for p in self.members.processes.values() if p.rank is not None and p.alive and not p.failed]
        assert len(ranks) == len(set(ranks)), f"two live processes hold one rank: {sorted(ranks)}"
        assert sorted(ranks) == list(self.members.by_rank()), "the holders of ranks are kept wrongly"
        reserve = [p for p in self.members.processes.values() if p.rank is None and p.alive and not p.failed]
        assert reserve == self.members.standbys(), "the standbys are kept wrongly"
        assert self.stage is not Stage.RESTORING or self.job.attempt.decision is not None
