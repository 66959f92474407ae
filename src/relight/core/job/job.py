"""The data that every stage of the controller shares: members, what is lost, the generation, the end of the job.

Everything else belongs to one stage or one concern: the other files of this folder. `Controller` in core/controller.py
composes them. A part gets the job and the parts that it calls by name, so the order of construction is that of need:

    job <- attempts <- reserve <- starting
           saving <- failing <- stopping (with deciding), restoring, training, finishing
                                processes, agents, repeating: facts that matter in any stage
"""

import enum

import msgspec

from relight.core.account.job_stats import KEPT_IN_ACCOUNT, JobStats
from relight.core.membership.host_orders import HostOrders
from relight.core.membership.hosts import Hosts
from relight.core.membership.members import Members, Process
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Command, EndJob, Notice, Stop
from relight.core.recovery.attempt import RecoveryAttempt
from relight.core.recovery.buddies import choose_buddies
from relight.core.recovery.coverage import Coverage
from relight.core.recovery.fallback import Fallback
from relight.core.recovery.shards import Shards


class Stage(enum.StrEnum):
    STARTING = "starting"  # waiting for every rank to reach its first step
    TRAINING = "training"  # waiting for every rank to be done; after a broken collective, for the death that caused it
    STOPPING = "stopping"  # waiting for every member to pause, and for a process for every rank
    RESTORING = "restoring"  # waiting for every member to hold the target version
    SAVING = "saving"  # the job must end: waiting for survivors to pause, then for a last checkpoint
    FINISHING = "finishing"  # training is done; the scripts run to their ends
    ENDED = "ended"  # every event is ignored


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the job's settings that decisions depend on."""

    world_size: int
    nodes: int = 1  # hosts that share the initial ranks; more may join, as room for standbys and replacements
    spare_nodes: int = 0  # hosts beside them that are expected at the start, with room for standbys
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
    supplier: str = ""  # what new hosts are ordered with; empty: none are
    supply_spares: int | None = None  # spare hosts to keep; None: each host that is lost is replaced
    supply_timeout_seconds: float = 3600.0  # for the host of an order to join
    supply_idle_seconds: float = 600.0  # that an ordered host is kept without use
    fault_status: int = 0  # above 0: the cluster makes a host again, perhaps elsewhere, that its machine is no good for
    staying_host: str = ""  # the agent of the host that cannot leave before the job is over; empty: all can


class Job:
    """One job, as far as its controller knows. Facts that no decision needs any more are dropped after a while."""

    def __init__(self, settings: ControllerSettings, *, full_account: bool = False) -> None:
        """`full_account`: keep every failure and recovery, for a report or a page, and not only the newest."""
        self.settings = settings
        self.stage = Stage.STARTING
        self.generation = 1
        self.deadline: float | None = None  # of the stage
        self.until = 0
        self.began_at = 0  # the version that the job started from: 0, or that of a checkpoint
        self.ended: EndJob | None = None
        self.members = Members()
        self.hosts = Hosts()
        self.orders = HostOrders()
        self.shards = Shards()  # known from the first step on
        self.coverage: Coverage | None = None  # of a divided state: which losses it survives
        self.buddy_every = 0  # steps from snapshot to snapshot, 0: none
        self.checkpoint_every = 0
        self.attempt = RecoveryAttempt()
        self.fallback = Fallback()
        self.went_apart = False  # ranks that went on alone between two steps hold different states
        self.go_alone = False  # ranks that wait in a collective between two steps are not to wait any longer
        self.tracebacks: dict[str, ev.WorkerFailed] = {}  # exceptions of the script, by process
        self.job_stats = JobStats(
            settings.world_size, settings.standbys, kept=None if full_account else KEPT_IN_ACCOUNT
        )

    @property
    def leaving(self) -> list[Process]:
        """The processes that hold ranks on hosts that are to be left."""
        draining = self.hosts.draining
        return [p for p in self.members.by_rank().values() if p.agent in draining] if draining else []

    @property
    def wanted_standbys(self) -> int:
        """The number of standbys to keep: as many as were asked for, or more while ranks are to move."""
        return max(self.settings.standbys, len(self.leaving))

    @property
    def awaits_spares(self) -> bool:
        """True if the job is at its start, and spare hosts on which its standbys belong have not joined yet."""
        return self.stage is Stage.STARTING and self.hosts.spares < self.settings.spare_nodes

    # --- members and their state --------------------------------------------------------------------------------
    def is_member(self, name: str) -> bool:
        """Return whether a live, unfailed process of this name holds a rank."""
        process = self.members.processes.get(name)
        return process is not None and process.alive and not process.failed and process.rank is not None

    def lost_without(self, process: Process | None = None) -> bool:
        """Return whether some part of the state is on no member (other than `process`), as far as is known."""
        return self.shards.lacks(
            rank for rank, p in self.members.by_rank().items() if p.may_hold_state and p is not process
        )

    @property
    def has_fallback(self) -> bool:
        """True if there may be a fallback tier. Only the ranks' reports can say which one holds the state."""
        return bool(self.buddy_every or self.checkpoint_every)

    def describe_loss(self) -> str:
        """The error of a job that has lost a part of its state, in words."""
        last = self.job_stats.failures.last
        held = [rank for rank, p in self.members.by_rank().items() if p.may_hold_state]
        lost = self.shards.lost(held) or "every replica of the state is lost"
        return f"{lost}; last: rank {last.rank} in {last.phase} of step {last.step}: {last.evidence}. {self.advice()}"

    def advice(self) -> str:
        """Tell a user whose job has lost its state how to continue."""
        if self.checkpoint_every:
            return "Resume from your last checkpoint"
        return (
            "Resume from your last checkpoint, if you keep your own: relight kept none of this job, since the script "
            "does not call training.checkpoint(...); training.buddy(...) keeps copies in memory"
        )

    def buddies(self) -> tuple[int, ...]:
        """For each rank, the rank that keeps its snapshots; empty while a rank has no process, since all stop first."""
        if not self.buddy_every or not self.members.is_complete(self.settings.world_size):
            return ()
        held = self.members.by_rank()
        return choose_buddies([self.shards.key(rank) for rank in held], [process.agent for process in held.values()])

    def writers(self) -> tuple[tuple[str, int], ...]:
        """For each part of a divided state, the rank that writes it into checkpoints: the first that holds it."""
        if not self.checkpoint_every:
            return ()
        return tuple((key, ranks[0]) for key, ranks in self.shards.groups().items())

    # --- the account --------------------------------------------------------------------------------------------
    def note_version(self, event: ev.Event) -> None:
        """Note the version that the job has reached: part of its account, however it ends."""
        stats = self.job_stats
        match event:
            case ev.ProcessDying() | ev.ProcessExited() | ev.ProcessSuspected():
                stats.committed(event.position.version, event.position.generation)
            case ev.Stopped() if not event.blank:
                stats.committed(event.version, event.generation - 1)
            case ev.AgentLost() | ev.ShutdownRequested():
                stats.committed(event.version)
            case ev.WorkerFailed() if self.stage is Stage.TRAINING:
                stats.committed(event.step)  # it was in this step: those before it are done
            case ev.Saved() if event.generation == self.generation and not event.error:
                stats.committed(event.version)
            case ev.StepResumed() if event.generation == self.generation:
                stats.committed(event.step + 1)

    def on_notice(self, event: ev.WorkerNotice) -> list[Command]:
        """A worker has something to say to the user; repetitions are ignored."""
        return [Notice(why=event.text, level="warning")] if self.job_stats.notice(event.text) else []

    def on_doubt(self, event: ev.BitsDoubted) -> list[Command]:
        """A worker cannot vouch for the bits of an undisturbed run."""
        if not self.job_stats.doubts.add(event.rank, event.step, event.reason, event.process):
            return []
        why = f"the bits may differ from those of an undisturbed run: rank {event.rank}: {event.reason}"
        return [Notice(why=why, level="warning")]

    def on_fault_struck(self, event: ev.FaultStruck) -> list[Command]:
        """A planned fault is about to strike: it is not planned again."""
        self.job_stats.struck.add(event.fault)
        return []

    # --- failures -----------------------------------------------------------------------------------------------
    def last_traceback(self) -> ev.WorkerFailed | None:
        """The exception of the process that failed last, if it raised one."""
        failures = self.job_stats.failures
        return self.tracebacks.get(failures.last.process) if failures.count else None

    def forget_the_dead(self) -> None:
        """Drop dead processes once every rank is restored: late reports about them are ignored."""
        self.members.forget_dead()
        known = self.members.processes
        last = self.job_stats.failures.last.process if self.job_stats.failures.count else ""
        self.tracebacks = {name: said for name, said in self.tracebacks.items() if name in known or name == last}
        self.job_stats.failures.forget_unexplained(known)

    # --- from one generation to the next, and the end -----------------------------------------------------------
    def stop_everyone(self, why: str, now: float, stop_limit_seconds: float | None = None) -> Stop:
        """Open the next generation: a new recovery attempt, in which every member is asked anew."""
        settings = self.settings
        # The last resort: a rank between two steps may evaluate for long, and one inside is judged by the detector.
        at_most = settings.stop_timeout_seconds + settings.outside_hang_timeout_seconds
        self.attempt = RecoveryAttempt(at_most if stop_limit_seconds is None else stop_limit_seconds)
        for process in self.members.by_rank().values():
            process.asked_at = now
        self.generation += 1
        self.stage = Stage.STOPPING
        self.deadline = now + self.attempt.stop_limit_seconds
        self.job_stats.recoveries.stopping(self.generation, now)
        return Stop(generation=self.generation, alone=self.go_alone, why=why)

    def end(self, error: str, now: float, raised: ev.WorkerFailed | None = None) -> list[Command]:
        """End the job: with an error, or, if it is empty, because training finished."""
        self.stage, self.deadline = Stage.ENDED, None
        self.job_stats.ended(error, now)
        details = raised.traceback if raised else ""
        self.ended = EndJob(error=error, details=details, why=error or "training finished")
        return [self.ended]
