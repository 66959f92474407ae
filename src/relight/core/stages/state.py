"""What the controller knows, and what every stage needs: who is a member, what is lost, and the end of the job.

Every other file of this folder adds the decisions of one stage, or about one kind of fact. `Controller` in
core/controller.py is all of them together. What one stage needs of another it inherits, so the order is:

    state <- reserve <- starting
                     <- failing <- training, stopping, restoring, finishing, repeating
                                               processes, agents: facts that matter in any stage
"""

import enum

import msgspec

from relight.core import events as ev
from relight.core.attempt import Ending, Fallback, RecoveryAttempt
from relight.core.backoff import Backoff
from relight.core.buddies import choose_buddies
from relight.core.commands import Audience, Begin, Command, EndJob, Release, Restore, Resume, Save, Stop, WindDown
from relight.core.coverage import Coverage
from relight.core.hosts import Hosts
from relight.core.job_stats import KEPT_IN_ACCOUNT, JobStats
from relight.core.members import Members, Process
from relight.core.recent import Recent
from relight.core.shards import Shards


class Stage(enum.StrEnum):
    STARTING = "starting"  # waiting for every rank to reach its first step
    TRAINING = "training"  # waiting for every rank to be done; after a broken collective, for the death behind it
    STOPPING = "stopping"  # waiting for every member to stand still, and for a process for every rank
    RESTORING = "restoring"  # waiting for every member to hold the target version
    SAVING = "saving"  # the job must end: waiting for survivors to stand still, then for a last checkpoint
    FINISHING = "finishing"  # training is done; the scripts run to their ends
    ENDED = "ended"  # nothing is listened to any more


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the job's settings that decisions depend on."""

    world_size: int
    nodes: int = 1  # hosts that share the initial ranks; more may join, as room for standbys and replacements
    standbys: int = 0
    stop_timeout_seconds: float = 30.0
    outside_hang_timeout_seconds: float = 600.0
    restore_timeout_seconds: float = 120.0
    startup_timeout_seconds: float = 600.0
    replace_slow: bool = False
    max_failures: int | None = None
    max_failures_per_step: int | None = None
    max_failed_attempts: int | None = None
    max_identical_errors: int = 2


class State:
    """One job, as far as its controller knows. What decisions do not need is forgotten after a while."""

    def __init__(self, settings: ControllerSettings, *, full_account: bool = False) -> None:
        """`full_account`: remember every failure and recovery, for a report or a page, and not only the newest."""
        self.settings = settings
        self.stage = Stage.STARTING
        self.generation = 1
        self.until = 0
        self.began_at = 0  # the version that the job started from: 0, or that of a checkpoint
        self.ended: EndJob | None = None
        self.members = Members()
        self.job_stats = JobStats(
            settings.world_size, settings.standbys, kept=None if full_account else KEPT_IN_ACCOUNT
        )
        self.hosts = Hosts()
        self.shards = Shards()  # known from the first step on
        self.coverage: Coverage | None = None  # what that is worth, if the state is divided
        self.buddy_every = 0  # steps from snapshot to snapshot, 0: none
        self.checkpoint_every = 0
        self._winding_down = ""  # why the job is to end after its next step
        self._ending = Ending()
        self._fallback = Fallback()
        self._history = 0  # the generation that last undid versions
        self._entered: dict[str, ev.TrainingEntered] = {}
        self._attempt = RecoveryAttempt()
        self._released: set[str] = set()
        self._deadline: float | None = None
        self._extended: float | None = None  # the deadline that was put off, once, in case the controller had slept
        self._slowest_start_seconds = 0.0
        self._recovery_step = -1  # the step that the recovery under way is about
        self._failures_at_step: Recent[int] = Recent()
        self._identical: Recent[tuple[object, ...]] = Recent()  # failures, by what makes two of them alike
        self._attempts: Recent[int] = Recent()  # of steps
        self._tracebacks: dict[str, ev.WorkerFailed] = {}
        self._to_resume: set[str] = set()  # members that have not committed a step since the last recovery
        self._standing_order: Begin | Stop | Restore | Resume | Save | Release | None = None
        self._backoff = Backoff()  # of attempts to bring in a replacement
        self._next_attempt: float | None = None  # when what was put off begins
        self._said_of_attempts = False  # that they fail, since the last success
        self._standby_errors: Recent[str] = Recent()  # what scripts raised in standbys, since one took a rank
        self._startup_restarts = 0

    @property
    def failures(self) -> int:
        """Failures so far."""
        return self.job_stats.failure_count

    def _is_member(self, name: str) -> bool:
        process = self.members.processes.get(name)
        return process is not None and process.alive and not process.failed and process.rank is not None

    def _lost_without(self, process: Process | None = None) -> bool:
        """Whether some part of the state is on no member (other than `process`), as far as is known."""
        return self.shards.lacks(
            rank for rank, p in self.members.by_rank().items() if p.may_hold_state and p is not process
        )

    @property
    def _has_fallback(self) -> bool:
        """Whether there may be something below replicas. What there is, only the ranks' reports can say."""
        return bool(self.buddy_every or self.checkpoint_every)

    def _advice(self) -> str:
        """What is left to do for who has lost the state."""
        if self.checkpoint_every:
            return "Resume from your last checkpoint"
        return (
            "Resume from your last checkpoint, if you keep your own: relight kept none of this job, since the script "
            "does not call training.checkpoint(...); training.buddy(...) keeps copies in memory"
        )

    def _buddies(self) -> tuple[int, ...]:
        """For each rank, who keeps its snapshots from now on. Nobody while a rank has no process: all stop first."""
        if not self.buddy_every or not self.members.is_complete(self.settings.world_size):
            return ()
        held = self.members.by_rank()
        return choose_buddies([self.shards.key(rank) for rank in held], [process.agent for process in held.values()])

    def _writers(self) -> tuple[tuple[str, int], ...]:
        """Who writes each part of a divided state into checkpoints: the first rank that holds it."""
        if not self.checkpoint_every:
            return ()
        return tuple((key, ranks[0]) for key, ranks in self.shards.groups().items())

    @property
    def _newest_step(self) -> int:
        """For a failure whose step nobody can know any more."""
        return self._recovery_step if self.stage is not Stage.TRAINING else -1

    def _step_of(self, process: Process, step: int) -> int:
        """A replacement that is not restored yet has no step of its own; it dies for the recovery's."""
        return self._recovery_step if process.replacement else step

    def _forget_the_dead(self) -> None:
        """Everyone is restored: nobody will be asked about them again, and what is still said of them is ignored."""
        self.members.forget_dead()
        known = self.members.processes
        last = self.job_stats.failures[-1].process if self.job_stats.failures else ""
        self._tracebacks = {name: said for name, said in self._tracebacks.items() if name in known or name == last}
        self.job_stats.forget_unexplained(known)

    def _last_traceback(self) -> ev.WorkerFailed | None:
        """What the script said when the process of the last failure raised, if it did."""
        return self._tracebacks.get(self.job_stats.failures[-1].process) if self.job_stats.failures else None

    def _wind_down(self) -> list[Command]:
        """Said again in each generation: who knew it may be gone, and nobody counts on it across a recovery."""
        if not self._winding_down:
            return []
        return [WindDown(audience=Audience.MEMBERS, generation=self.generation, why=self._winding_down)]

    def _stop_everyone(self, why: str, now: float, stop_limit_seconds: float | None = None) -> Stop:
        """Open the next generation: whatever was under way is forgotten, and everybody is asked anew."""
        settings = self.settings
        # The last resort: a rank between two steps may evaluate for long, and one inside is judged by the detector.
        at_most = settings.stop_timeout_seconds + settings.outside_hang_timeout_seconds
        self._attempt = RecoveryAttempt(at_most if stop_limit_seconds is None else stop_limit_seconds)
        for process in self.members.by_rank().values():
            process.asked_at = now
        self.generation += 1
        self.stage = Stage.STOPPING
        self._deadline = now + self._attempt.stop_limit_seconds
        self.job_stats.stopping(self.generation, now)
        return Stop(audience=Audience.MEMBERS, generation=self.generation, why=why)

    def _end(self, error: str, now: float, raised: ev.WorkerFailed | None = None) -> list[Command]:
        self.stage, self._deadline, self._next_attempt = Stage.ENDED, None, None
        self.job_stats.ended(error, now)
        details = raised.traceback if raised else ""
        self.ended = EndJob(error=error, details=details, why=error or "training finished")
        return [self.ended]
