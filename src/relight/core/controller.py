"""The controller's decisions: facts in, orders out, time as an argument. No sockets, no clock, no randomness.

    STARTING -> TRAINING -> FINISHING -> ENDED
                 |     ^
                 v     |
              STOPPING -> RESTORING        (a failure in either opens the next generation, from STOPPING)

The shell around it (relight.server) calls `handle(event, now)`, `expire(now)` when `next_deadline()` has passed,
and carries out the commands in order. It journals each event and command first, so a journal can be replayed.
"""

import enum
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import assert_never

import msgspec

from relight.core import events as ev
from relight.core import waiting
from relight.core.commands import (
    Assign,
    Audience,
    Begin,
    Command,
    EndJob,
    Kill,
    Notice,
    Release,
    Restore,
    Resume,
    Source,
    Spawn,
    Stop,
)
from relight.core.corruption import describe_difference, outvoted
from relight.core.coverage import Coverage, coverage, describe
from relight.core.decision import Decision, Halt, decide
from relight.core.fault import Fault
from relight.core.hosts import Hosts
from relight.core.ledger import Ledger
from relight.core.members import Members, Process
from relight.core.position import Phase
from relight.core.report import JobReport
from relight.core.shards import Shards, content_mismatch, require_every_part


class Stage(enum.StrEnum):
    STARTING = "starting"  # waiting for every rank to reach its first step
    TRAINING = "training"  # waiting for every rank to be done; after a broken collective, for the death behind it
    STOPPING = "stopping"  # waiting for every member to stand still, and for a process for every rank
    RESTORING = "restoring"  # waiting for every member to hold the target version
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
    max_failures: int | None = None
    max_failures_per_step: int = 10
    max_identical_errors: int = 2


# A collective that breaks is nearly always the echo of a death that the agent reports within milliseconds. Only
# if none is reported for this long is the network itself held to be the cause.
COLLECTIVE_GRACE_SECONDS = 0.25
# A standby that takes longer than this, and than twice the slowest start of this job, may never be warm: start another
# beside it.
STANDBY_PATIENCE_SECONDS = 30.0
OVERSLEPT_SECONDS = 1.0  # a deadline that is noticed later than this passed while the controller was stopped
MAX_RESTORE_FAILURES = 5
MAX_CORRUPTIONS = 3  # of the same ranks
ENDED = "ended"  # kind of a failure whose process is still being torn down
MAX_NAMED = 64  # ranks in one line for people
# A replacement copies from a few replicas at once; an order that named ten thousand would be a megabyte for each agent.
MAX_SOURCES_PER_TARGET = 16
MAX_SOURCES = 256
MAX_STANDBY_FAILURES = 3  # in a row
STANDBY_PROVEN_SECONDS = 60.0
MAX_STARTUP_RESTARTS = 3


class Controller:
    """One job. See the module's docstring for the calling convention."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.stage = Stage.STARTING
        self.generation = 1
        self.until = 0
        self.ended: EndJob | None = None
        self.members = Members()
        self.ledger = Ledger(settings.world_size, settings.standbys)
        self.hosts = Hosts()
        self.shards = Shards()  # known from the first step on
        self.coverage: Coverage | None = None  # what that is worth, if the state is divided
        self._entered: dict[str, ev.TrainingEntered] = {}
        self._stopped: dict[str, ev.Stopped] = {}
        self._restored: dict[str, ev.Restored] = {}
        self._done: dict[str, ev.TrainingDone] = {}
        self._released: set[str] = set()
        self._decision: Decision | None = None
        self._deadline: float | None = None
        self._extended: float | None = None  # the deadline that was put off, once, because the controller had slept
        self._suspected_collective: ev.CollectiveFailed | None = None
        self._suspected_restore: ev.RestoreFailed | None = None
        self._stop_limit_seconds = 0.0
        self._slowest_start_seconds = 0.0
        self._recovery_step = -1  # the step that the recovery under way is about
        self._failures_at_step: Counter[int] = Counter()
        self._identical: Counter[tuple[object, ...]] = Counter()
        self._attempts: Counter[int] = Counter()
        self._tracebacks: dict[str, ev.WorkerFailed] = {}
        self._to_resume: set[str] = set()  # members that have not committed a step since the last recovery
        self._standing_order: Begin | Stop | Restore | Resume | Release | None = None
        self._restore_failures = 0
        self._standby_failures = 0
        self._startup_restarts = 0

    # --- what the shell and people look at --------------------------------------------------------------------
    def audience(self, audience: Audience) -> tuple[str, ...]:
        """Names of the processes that a command of this audience goes to, now."""
        return self.members.audience(audience)

    def rank_processes(self) -> Mapping[int, str]:
        """Rank to process name, in the order of ranks."""
        return self.members.names_by_rank()

    @property
    def failures(self) -> int:
        """Failures so far."""
        return len(self.ledger.failures)

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
        return frozenset(self.ledger.struck)

    def report(self) -> JobReport:
        """The report so far."""
        return self.ledger.report()

    def waiting(self, now: float) -> str:
        """Whom the job waits for, and why, in words; empty while it trains."""
        members, settings = self.members, self.settings
        match self.stage:
            case Stage.STARTING:
                return waiting.for_first_step(members, self._entered, len(self.hosts), settings.nodes, now)
            case Stage.STOPPING:
                return waiting.to_decide(members, self._stopped, settings.world_size, now)
            case Stage.RESTORING:
                return waiting.to_resume(members, self._restored, self.ledger.decided_at, now)
            case Stage.FINISHING:
                return waiting.for_ends(members)
        return ""

    def next_deadline(self) -> float | None:
        """When `expire` wants to be called, or None."""
        return self._deadline

    def check(self) -> None:
        """Assert what must always hold."""
        assert self.generation >= 1
        ranks = [p.rank for p in self.members.processes.values() if p.rank is not None and p.alive and not p.failed]
        assert len(ranks) == len(set(ranks)), f"two live processes hold one rank: {sorted(ranks)}"
        assert sorted(ranks) == list(self.members.by_rank()), "who holds which rank is kept wrongly"
        reserve = [p for p in self.members.processes.values() if p.rank is None and p.alive and not p.failed]
        assert reserve == self.members.standbys(), "who is in reserve is kept wrongly"
        assert self.stage is not Stage.RESTORING or self._decision is not None

    # --- events ------------------------------------------------------------------------------------------------
    def handle(self, event: ev.Event, now: float) -> tuple[Command, ...]:
        """Take in one fact; return the orders it leads to, in the order in which they must be carried out."""
        if self.stage is Stage.ENDED:
            return ()
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
            case ev.TrainingDone():
                out = self._on_done(event, now)
            case ev.WorkerReleased():
                self._released.add(event.process)
                out = []
            case ev.WorkerNotice():
                known = event.text in self.ledger.notices  # said before by a process whose rank was taken over
                self.ledger.notices += [] if known else [event.text]
                out = [] if known else [Notice(why=event.text, level="warning")]
            case ev.FaultStruck():
                self.ledger.struck.add(event.fault)
                out = []
            case ev.ControllerRestarted():
                out = self._on_controller_restarted(now)
            case ev.ShutdownRequested():
                out = self._end(f"stopped: {event.reason}", now)
            case _:
                assert_never(event)
        return self._given(out)

    def expire(self, now: float) -> tuple[Command, ...]:
        """The deadline has passed: whoever was waited for has failed too, or the grace is over."""
        if self._deadline is None or now < self._deadline or self.stage is Stage.ENDED:
            return ()
        if now - self._deadline > OVERSLEPT_SECONDS and self._deadline != self._extended:
            # Nobody looked when it passed: whoever is waited for may have answered meanwhile, and is heard first.
            self._deadline = self._extended = now + OVERSLEPT_SECONDS
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
        return ()

    def _given(self, commands: list[Command]) -> tuple[Command, ...]:
        """Keep the newest order to all: it holds until the next one."""
        for command in commands:
            if isinstance(command, Begin | Stop | Restore | Resume | Release):
                self._standing_order = command
        return tuple(commands)

    # --- starting ----------------------------------------------------------------------------------------------
    def _on_agent_joined(self, event: ev.AgentJoined, now: float) -> list[Command]:
        if event.agent in self.hosts:  # the same agent again, after a restart: its workers live on
            self._forget_pages(event.agent)
            return self._repeat_orders()
        if not len(self.hosts) and not self.members.processes:
            self.ledger.started(now)
            self._deadline = now + self.settings.startup_timeout_seconds
        self.hosts.add(event.agent, event.slots)
        nodes = self.settings.nodes
        if self.members.processes:  # a late one: room for what is missing
            notice = Notice(why=f"{event.agent} joined; {len(self.hosts)} hosts", level="info")
            settled = self.stage in (Stage.TRAINING, Stage.STARTING) and not self._to_resume
            more = self._top_up_standbys(now) if settled else []
            return [notice, *more, *(self._fill_vacancies(now) if self.stage is Stage.STOPPING else [])]
        if len(self.hosts) < nodes:
            return [Notice(why=f"{event.agent} joined; waiting for {nodes - len(self.hosts)} more", level="info")]
        return self._spawn_initial(now, "initial rank") + self._top_up_standbys(now)

    def _forget_pages(self, agent: str) -> None:
        """The pages of its dead processes went with an agent; those of the living are in their own hands too."""
        for process in self.members.processes.values():
            if process.agent == agent and not process.alive:
                process.final_position = msgspec.structs.replace(process.final_position, private_versions=(-1, -1))

    def _repeat_orders(self) -> list[Command]:
        """What an agent had not passed on when it died is lost. Who has an order already ignores it the second time.

        Processes that it had not started are not repeated: the server reports them as ended.
        """
        why = "said again to an agent that was restarted"
        out: list[Command] = [Kill(process=p.name, why=why) for p in self.members.processes.values() if _is_doomed(p)]
        for rank, process in self.members.by_rank().items():
            if process.replacement or (self.stage is Stage.STARTING and process.started):
                out.append(Assign(process=process.name, rank=rank, generation=self.generation, why=why))
        return out if self._standing_order is None else [*out, self._standing_order]

    def _spawn_initial(self, now: float, why: str) -> list[Command]:
        places = self.hosts.initial(self.settings.world_size, self.settings.nodes)
        return [self._spawn(rank, place, now, why=why) for rank, place in enumerate(places)]

    def _spawn(self, rank: int | None, place: tuple[str, int], now: float, *, why: str, fresh: bool = False) -> Spawn:
        agent, slot = place
        process = self.members.add(agent, slot, rank, now, fresh=fresh)
        return Spawn(agent=process.agent, process=process.name, rank=rank, slot=slot, why=why)

    def _place(self) -> tuple[str, int]:
        return self.hosts.place(self.members.processes.values())

    def _top_up_standbys(self, now: float) -> list[Command]:
        """Keep as many standbys as were asked for, warm or on their way."""
        if self._standby_failures >= MAX_STANDBY_FAILURES or not len(self.hosts):
            return []
        missing = self.settings.standbys - len(self.members.standbys())
        return [self._spawn(None, self._place(), now, why="a standby in reserve") for _ in range(missing)]

    def _on_started(self, event: ev.ProcessStarted) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or process.started:
            return []
        process.started, process.pid = True, event.pid
        if process.rank is None:
            return []
        return [Assign(process=process.name, rank=process.rank, generation=self.generation, why="initial rank")]

    def _on_entered(self, event: ev.TrainingEntered, now: float) -> list[Command]:
        if self.stage is not Stage.STARTING or not self._is_member(event.process):
            return []
        self._entered[event.process] = event
        if len(self._entered) < self.settings.world_size:
            return []
        reports = sorted(self._entered.values(), key=lambda e: e.rank)
        self.shards = Shards([report.shard for report in reports])
        problem = _startup_mismatch(reports, self.shards)
        if problem:
            return self._end(problem, now)
        self.stage, self._deadline, self.until = Stage.TRAINING, None, reports[0].until
        for process in self.members.by_rank().values():
            process.may_hold_state = True
        self._slowest_start_seconds = now - min(p.spawned_at for p in self.members.by_rank().values())
        digest = self.shards.digest([report.state_digest for report in reports])
        self.ledger.began(now, reports[0], digest)
        what = "replicas of the same state" if self.shards.divided else "the same state"
        return [
            *self._cover(reports),
            Begin(
                audience=Audience.MEMBERS,
                generation=self.generation,
                why=f"all {self.settings.world_size} ranks hold {what} ({digest})",
            ),
            Notice(why=f"training; {self._describe_pids()}", level="info"),
        ]

    def _cover(self, reports: Sequence[ev.TrainingEntered]) -> list[Command]:
        """Say what a divided state survives, before the first step."""
        if not self.shards.divided:
            return []
        hosts = [process.agent for process in self.members.by_rank().values()]
        self.coverage = coverage(self.shards.groups(), hosts, {r.shard: r.state_bytes for r in reports})
        return [Notice(why=line, level="info") for line in describe(self.coverage)]

    def _describe_pids(self) -> str:
        """For people with py-spy, gdb or kill."""
        held = list(self.members.by_rank().items())
        named = ", ".join(f"rank {rank} is pid {process.pid}" for rank, process in held[:MAX_NAMED])
        return f"{named}, and {len(held) - MAX_NAMED} more (see the journal)" if len(held) > MAX_NAMED else named

    def _on_startup_timeout(self, now: float) -> list[Command]:
        late = sorted(rank for rank, p in self.members.by_rank().items() if p.name not in self._entered)
        return self._end(
            f"rank {', '.join(map(str, late))} did not reach its first step within "
            f"{self.settings.startup_timeout_seconds:g} s; raise --startup-timeout-seconds if the script needs longer",
            now,
        )

    def _restart_startup(self, failure: str, now: float) -> list[Command]:
        """Before the first step there is nothing to preserve: start all ranks anew."""
        self._startup_restarts += 1
        if self._startup_restarts > MAX_STARTUP_RESTARTS:
            return self._end(f"{failure}; {MAX_STARTUP_RESTARTS} starts have failed", now)
        out: list[Command] = [Notice(why=f"{failure} before the first step; starting all ranks again", level="warning")]
        for process in self.members.by_rank().values():
            self.members.fail(process)
            out.append(Kill(process=process.name, why="starting all ranks again"))
        self.members.predecessors.clear()
        self._entered.clear()
        self.generation += 1
        self._deadline = now + self.settings.startup_timeout_seconds
        return out + self._spawn_initial(now, "initial rank, again")

    # --- failures ----------------------------------------------------------------------------------------------
    def _on_dying(self, event: ev.ProcessDying, now: float) -> list[Command]:
        """Do not wait until its memory is freed. Outside training there is no hurry."""
        process = self.members.processes.get(event.process)
        if process is None or process.gone or process.rank is None:
            return []
        if not process.alive or self.stage in (Stage.STARTING, Stage.FINISHING):
            return []
        if not process.failed and self._lost_without(process):
            return []  # the end of the job; then better with the reason, which comes with its exit
        process.gone = True
        process.final_position = event.position
        if process.failed:
            return self._advance(now)
        self.ledger.failure(process, ENDED, "its process ended", event.position, event.noticed_ns, self.generation, now)
        return self._fail([process], self._step_of(process, event.position.step), None, now)

    def _lost_without(self, process: Process | None = None) -> bool:
        """Whether some part of the state is on no member (other than `process`), as far as is known."""
        return self.shards.lacks(
            rank for rank, p in self.members.by_rank().items() if p.may_hold_state and p is not process
        )

    def _explain(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        """A process that was seen dying is dead, and it is known how it ended."""
        failure = self.ledger.amend(process.name, _kind_of_exit(event), event.evidence)
        out: list[Command] = [Notice(why=f"failure {failure.number}: its process {event.evidence}", level="warning")]
        if failure.kind == "killed" or event.exit_status is None:
            return out
        step = process.failed_at_step  # not the page's: that of a replacement may say nothing yet, and is always alike
        key = (failure.kind, failure.rank, step, event.exit_status)
        self._identical[key] += 1
        ending = self._breaker(step, key, self.settings.max_identical_errors)
        return out + (self._end(ending, now) if ending else [])

    def _on_exited(self, event: ev.ProcessExited, now: float) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or not process.alive:
            return []
        self.members.end(process)
        process.final_position = event.position
        unexplained = any(f.process == process.name and f.kind == ENDED for f in self.ledger.failures)
        explanation = self._explain(process, event, now) if unexplained else []
        if self.stage is Stage.FINISHING:
            return explanation + self._on_exit_after_training(process, event, now)
        if process.failed:  # declared failed before; its death was awaited
            return explanation + self._advance(now)
        if process.rank is None:
            return self._on_standby_lost(process, event.evidence, now)
        if self.stage is Stage.STARTING:
            return self._on_exit_before_training(process, event, now)
        kind = _kind_of_exit(event)
        step = self._step_of(process, event.position.step)
        known = kind != "killed" and event.exit_status is not None  # else nothing says that two ended alike
        key = (kind, process.rank, step, event.exit_status) if known else None
        self.ledger.failure(process, kind, event.evidence, event.position, event.noticed_ns, self.generation, now)
        return self._fail([process], step, key, now)

    def _step_of(self, process: Process, step: int) -> int:
        """A replacement that is not restored yet has no step of its own; it dies for the recovery's."""
        return self._recovery_step if process.replacement else step

    def _on_exit_before_training(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        raised = self._tracebacks.get(process.name)
        if raised is not None:
            return self._end(f"rank {process.rank} failed before its first step: {raised.summary}", now, raised)
        if event.exit_status == 0:
            return self._end(
                f"rank {process.rank} ended before its first step: the script must call relight.init() and take its "
                "steps from training.steps(); see `relight run --help` for an example",
                now,
            )
        if (event.exit_status or 0) > 0:
            return self._end(f"rank {process.rank} {event.evidence} before its first step", now)
        self.members.fail(process)
        return self._restart_startup(f"rank {process.rank} {event.evidence}", now)

    def _on_exit_after_training(self, process: Process, event: ev.ProcessExited, now: float) -> list[Command]:
        if process.rank is not None and not process.failed and event.exit_status not in (0, None):
            raised = self._tracebacks.get(process.name)
            what = raised.summary if raised else event.evidence
            return self._end(
                f"training finished, but rank {process.rank} failed in the code after the last step: {what}",
                now,
                raised,
            )
        return self._end_if_all_ended(now)

    def _end_if_all_ended(self, now: float) -> list[Command]:
        return [] if any(p.alive for p in self.members.processes.values()) else self._end("", now)

    def _on_standby_lost(self, process: Process, evidence: str, now: float) -> list[Command]:
        if process.ready and now - process.ready_at > STANDBY_PROVEN_SECONDS:
            self._standby_failures = 0  # it waited long enough to show that standbys as such work
        self._standby_failures += 1
        raised = self._tracebacks.get(process.name)
        what = f"{evidence} ({raised.summary})" if raised else evidence
        out: list[Command] = [Notice(why=f"standby {process.name} {what}", level="warning")]
        if self._standby_failures == MAX_STANDBY_FAILURES:
            out.append(
                Notice(why="no more standbys are started: too many failed without a success between", level="warning")
            )
        if self.stage is Stage.STOPPING and self._standby_failures >= MAX_STANDBY_FAILURES:
            ranks = ", ".join(map(str, self.members.vacant(self.settings.world_size)))
            if ranks and not self.members.standbys():
                what = f"{MAX_STANDBY_FAILURES} processes in a row failed before they could take rank {ranks}: {what}"
                return out + self._end(what, now, raised)
        out += self._top_up_standbys(now)
        return out + self._advance(now)

    def _on_suspected(self, event: ev.ProcessSuspected, now: float) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or not process.alive or process.failed:
            return []
        kill = Kill(process=process.name, why=event.evidence)
        if self.stage is Stage.FINISHING:
            return [kill]  # its death then ends the job with an error
        if process.rank is None:
            self.members.fail(process)
            return [kill, *self._on_standby_lost(process, event.evidence, now)]
        if self.stage is Stage.STARTING:
            self.members.fail(process)
            return [kill, *self._restart_startup(f"rank {process.rank}: {event.evidence}", now)]
        position, noticed_ns = event.position, event.noticed_ns
        self.ledger.failure(
            process, event.kind, event.evidence, position, noticed_ns, self.generation, now, stack=event.stack
        )
        step = self._step_of(process, event.position.step)
        key = ("hang", process.rank, step) if event.kind == "hang" else None
        return [kill, *self._fail([process], step, key, now)]

    def _on_worker_failed(self, event: ev.WorkerFailed, now: float) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or not process.alive or process.failed:
            return []
        self._tracebacks[event.process] = event
        if event.kind == "usage" and process.rank is not None:
            return self._end(f"rank {event.rank}: {event.summary}", now, event)
        if process.rank is None or self.stage in (Stage.STARTING, Stage.FINISHING):
            return []  # its exit tells the rest
        position = msgspec.structs.replace(process.final_position, step=event.step)
        self.ledger.failure(
            process, "exception", event.summary, position, event.noticed_ns, self.generation, now, phase=event.phase
        )
        kill = Kill(process=process.name, why=f"it raised {event.summary}")
        return [kill, *self._fail([process], event.step, ("exception", event.step, event.summary), now, event)]

    def _on_collective_failed(self, event: ev.CollectiveFailed, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING or event.generation != self.generation:
            return []
        if self._suspected_collective is None:
            self._suspected_collective = event
            self._deadline = now + COLLECTIVE_GRACE_SECONDS
        return []

    def _on_grace_over(self, now: float) -> list[Command]:
        event = self._suspected_collective
        if event is None:
            return []
        evidence = f"a collective of rank {event.rank} broke while every process lives: {event.summary}"
        self.ledger.failure(None, "communication", evidence, None, event.noticed_ns, self.generation, now, event.step)
        return self._fail([], event.step, ("communication", event.step), now, limit=MAX_RESTORE_FAILURES)

    def _on_stalled(self, event: ev.CommunicationStalled, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING:
            return []
        noticed_ns, step, stack = event.noticed_ns, event.step, event.stack
        self.ledger.failure(
            None, "communication", event.evidence, None, noticed_ns, self.generation, now, step, stack=stack
        )
        return self._fail([], event.step, ("stall", event.step), now)

    def _on_state_differs(self, event: ev.StateDiffers, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING or event.generation != self.generation:
            return []  # every rank says it; once is enough
        digests = dict(enumerate(event.digests))
        if len(digests) != self.settings.world_size or not self.shards.differing(digests):
            return []  # nonsense: nobody can be blamed by it
        return self._on_corruption(digests, digests, event.step, event.noticed_ns, now)

    def _on_corruption(
        self, digests: Mapping[int, int | str], voters: Collection[int], version: int, noticed_ns: int, now: float
    ) -> list[Command]:
        """Replicas of a version differ: those that are outvoted have failed. Nothing of theirs is copied from."""
        out: list[Command] = []
        processes: list[Process] = []
        wrong: tuple[int, ...] = ()
        for part in self.shards.differing(digests):  # those who hold the same part of the state vote on it
            minority = outvoted(part, [rank for rank in voters if rank in part])
            if minority is None:
                what = describe_difference(part, version)
                return self._end(f"{what}. Resume from your last checkpoint", now)
            right = len(part) - len(minority)
            evidence = f"its state of version {version} is not that of the other {right} ranks: memory was corrupted"
            wrong += minority
            for process in (self.members.by_rank()[rank] for rank in minority):
                position = msgspec.structs.replace(process.final_position, step=version, phase=Phase.BARRIER)
                self.ledger.failure(process, "corruption", evidence, position, noticed_ns, self.generation, now)
                processes.append(process)
                out.append(Kill(process=process.name, why=evidence))
        # Again and again the same ranks: not memory, but a script whose ranks do not compute the same.
        return out + self._fail(processes, version, ("corruption", wrong), now, limit=MAX_CORRUPTIONS)

    def _on_agent_lost(self, event: ev.AgentLost, now: float) -> list[Command]:
        """A host is gone, or cut off for so long: all that ran there has failed at once, and is answered at once.

        Should any of it live on, it is fenced: its generation is closed, and its agent is told to kill it if it comes
        back.
        """
        if event.agent not in self.hosts:
            return []
        self.hosts.remove(event.agent)
        if not len(self.hosts):
            return self._end(
                f"the agent of the only node is gone ({event.evidence}), and with it every replica of the state", now
            )
        if not self.members.processes:
            return [Notice(why=f"{event.agent} left before all hosts had joined", level="warning")]
        lost = [p for p in self.members.processes.values() if p.agent == event.agent and p.alive]
        held = [p for p in lost if p.rank is not None and not p.failed]
        for process in lost:
            self.members.end(process)
        self._forget_pages(event.agent)
        if self.stage is Stage.STARTING or (self.stage is Stage.FINISHING and held):
            when = "before the first step" if self.stage is Stage.STARTING else "before its scripts had ended"
            return self._end(f"{event.agent} was lost {when}: {event.evidence}", now)
        notice = Notice(why=f"{event.agent} is lost with {len(lost)} processes: {event.evidence}", level="warning")
        if self.stage is Stage.FINISHING:
            return [notice, *self._end_if_all_ended(now)]
        for process in held:
            self.ledger.failure(process, "host lost", event.evidence, None, 0, self.generation, now, self._newest_step)
        if held:
            return [notice, *self._fail(held, self._newest_step, None, now)]
        return [notice, *self._top_up_standbys(now), *self._advance(now)]

    @property
    def _newest_step(self) -> int:
        """For a failure whose step nobody can know any more."""
        return self._recovery_step if self.stage is not Stage.TRAINING else -1

    def _fail(
        self,
        processes: list[Process],
        step: int,
        key: tuple[object, ...] | None,
        now: float,
        raised: ev.WorkerFailed | None = None,
        limit: int = 0,
    ) -> list[Command]:
        """Take failed processes out, unless it is one failure too many; then open the next generation."""
        for process in processes:
            self.members.fail(process)
            process.failed_at_step = step
        if self.stage is Stage.TRAINING:
            self._recovery_step = step
        self._failures_at_step[step] += 1
        if key is not None:
            self._identical[key] += 1
        ending = self._breaker(step, key, limit or self.settings.max_identical_errors)
        if ending:
            return self._end(ending, now, raised)
        return self._open_generation(now)

    def _breaker(self, step: int, key: tuple[object, ...] | None, limit: int) -> str:
        """Why it is useless to go on, or an empty string."""
        last = self.ledger.failures[-1]
        where = f"rank {last.rank} in {last.phase} of step {last.step}" if last.rank >= 0 else "all ranks"
        if key is not None and self._identical[key] >= limit:
            return f"{where}: {last.evidence} ({limit} times in the same place, so it is a bug, not a failure)"
        if self.settings.max_failures is not None and self.failures > self.settings.max_failures:
            return f"{self.failures} failures, more than --max-failures {self.settings.max_failures}; last {where}"
        if step >= 0 and self._failures_at_step[step] > self.settings.max_failures_per_step:
            return f"step {step} failed {self._failures_at_step[step]} times; last: {where}: {last.evidence}"
        return ""

    # --- a recovery --------------------------------------------------------------------------------------------
    def _open_generation(self, now: float, stop_limit_seconds: float | None = None) -> list[Command]:
        """A failure, wherever it struck: from the top, under a new number."""
        if self._lost_without():
            return self._end(self._all_lost(), now, self._last_traceback())
        last = self.ledger.failures[-1]
        return [
            self._stop_everyone(last.evidence, now, stop_limit_seconds),
            Notice(why=self.ledger.describe_failure(last), level="warning"),
            *self._fill_vacancies(now),
        ]

    def _stop_everyone(self, why: str, now: float, stop_limit_seconds: float | None = None) -> Stop:
        """Open the next generation: whatever was under way is forgotten, and everybody is asked anew."""
        settings = self.settings
        # The last resort: a rank between two steps may evaluate for long, and one inside is judged by the detector.
        at_most = settings.stop_timeout_seconds + settings.outside_hang_timeout_seconds
        self._stop_limit_seconds = at_most if stop_limit_seconds is None else stop_limit_seconds
        for process in self.members.by_rank().values():
            process.asked_at = now
        self.generation += 1
        self.stage = Stage.STOPPING
        self._stopped.clear()
        self._restored.clear()
        self._done.clear()
        self._decision = None
        self._suspected_collective = None
        self._suspected_restore = None
        self._deadline = now + self._stop_limit_seconds
        self.ledger.stopping(self.generation, now)
        return Stop(audience=Audience.MEMBERS, generation=self.generation, why=why)

    def _all_lost(self) -> str:
        last = self.ledger.failures[-1]
        held = [rank for rank, p in self.members.by_rank().items() if p.may_hold_state]
        what = self.shards.lost(held) or "every replica of the state is lost"
        return (
            f"{what}; last: rank {last.rank} in {last.phase} of step {last.step}: {last.evidence}. "
            "Resume from your last checkpoint"
        )

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
        for rank in vacant[len(coming) :]:
            out.append(
                self._spawn(
                    None, self._place(), now, why=f"no standby is left for rank {rank}: a fresh process", fresh=True
                )
            )
        if vacant:
            self._deadline = now + min(self._patience_seconds, self._stop_limit_seconds)
        return out

    def _pair(self, standbys: list[Process], vacant: list[int]) -> list[tuple[Process, int]]:
        """Who takes which rank: one on the lost holder's own host if there is one, since private state lies there."""
        pairs: list[tuple[Process, int]] = []
        free, ranks = list(standbys), list(vacant)
        for rank in vacant:
            before = self.members.predecessors.get(rank, ())
            host = self.members.processes[before[-1]].agent if before else ""
            near = next((standby for standby in free if standby.agent == host), None)
            if near is not None:
                pairs.append((near, rank))
                free.remove(near)
                ranks.remove(rank)
        return pairs + list(zip(free, ranks, strict=False))

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

    def _on_standby_ready(self, event: ev.StandbyReady, now: float) -> list[Command]:
        process = self.members.processes.get(event.process)
        if process is None or process.rank is not None or process.failed:
            return []
        process.ready, process.ready_at = True, now
        self._slowest_start_seconds = max(self._slowest_start_seconds, now - process.spawned_at)
        if self.stage is Stage.STOPPING:
            return self._fill_vacancies(now)
        return self._surplus() if self.stage is Stage.TRAINING else []

    def _on_stopped(self, event: ev.Stopped, now: float) -> list[Command]:
        if self.stage is not Stage.STOPPING or event.generation != self.generation:
            return []
        if not self._is_member(event.process):
            return []
        self._stopped[event.process] = event
        self.ledger.stopped(event, now)
        return self._advance(now)

    def _advance(self, now: float) -> list[Command]:
        """Decide as soon as every rank has a process, all stand still, and every failed process is known dead."""
        if self.stage is not Stage.STOPPING:
            return []
        if not self.members.is_complete(self.settings.world_size):
            return self._fill_vacancies(now)
        if len(self._stopped) < self.settings.world_size:  # the usual answer, without a look at every rank
            return []
        held = self.members.by_rank()
        if self.members.dying() or any(p.name not in self._stopped for p in held.values()):
            return []
        replaced = [rank for rank, p in held.items() if p.replacement]
        reports = [self._stopped[p.name] for p in held.values()]
        blank = {r.rank for r in reports if r.blank}
        private = {rank: self.members.private_versions(rank) for rank in replaced if rank in blank}
        derived = _derived(reports, private)
        known = {rank: versions for rank, versions in private.items() if rank not in derived}
        decision = require_every_part(decide(reports, known, self.settings.world_size), self.shards)
        if isinstance(decision, Halt):
            return self._end(f"{decision.reason}. Resume from your last checkpoint", now, self._last_traceback())
        self.stage, self._decision = Stage.RESTORING, decision
        for process in held.values():
            process.may_hold_state = True
        self._deadline = now + self.settings.restore_timeout_seconds
        self.ledger.decided(decision, [p for p in held.values() if p.replacement], now)
        served = {
            r.rank: Source(
                rank=r.rank, address=r.restore_address, endpoint=r.restore_endpoint, shard=self.shards.key(r.rank)
            )
            for r in reports
        }
        lost = [self.members.processes[name] for rank in replaced for name in self.members.predecessors.get(rank, ())]
        begun = {r.step for r in reports if not r.blank} | {p.final_position.step for p in lost}
        if decision.target in begun:
            self._attempts[decision.target] += 1
        return [
            Restore(
                audience=Audience.MEMBERS,
                generation=self.generation,
                target=decision.target,
                attempt=self._attempts[decision.target],
                sources=tuple(served[rank] for rank in self._choose_sources(decision)),
                targets=decision.targets,
                derived=derived,
                why=f"{decision.direction} to version {decision.target}: {decision.reason}",
            )
        ]

    def _choose_sources(self, decision: Decision) -> Sequence[int]:
        """Of the ranks that can serve, enough for the targets; of each part of the state, if it is divided.

        Without a target none is needed, but they are named all the same while they are few: that costs nothing.
        """
        count = min(MAX_SOURCES, MAX_SOURCES_PER_TARGET * max(1, len(decision.targets)))
        if len(decision.sources) <= count:
            return decision.sources
        held = self.members.by_rank()
        hosts = {held[rank].agent for rank in decision.targets}
        parts: dict[str, list[int]] = {}
        for rank in decision.sources:
            parts.setdefault(self.shards.key(rank), []).append(rank)
        chosen: list[int] = []
        for ranks in parts.values():
            near = [rank for rank in ranks if held[rank].agent in hosts][: count // 2]
            far = [rank for rank in ranks if held[rank].agent not in hosts]
            room = count - len(near)
            chosen += [*near, *far[:: max(1, len(far) // room)][:room]]  # from hosts everywhere: each has a line
        return sorted(chosen)

    def _on_restored(self, event: ev.Restored, now: float) -> list[Command]:
        if self.stage is not Stage.RESTORING or event.generation != self.generation:
            return []
        if not self._is_member(event.process) or self._decision is None:
            return []
        self._restored[event.process] = event
        self.ledger.restored(event, now)
        if len(self._restored) < self.settings.world_size:
            return []
        reports = sorted(self._restored.values(), key=lambda e: e.rank)
        problem = _handshake_mismatch(reports, self._decision.target, self.shards)
        if problem:
            digests = {report.rank: report.state_digest for report in reports}
            voters = [rank for rank in digests if rank not in self._decision.targets]
            alike = len({(r.version, r.lineage, r.layout_digest) for r in reports}) == 1
            if alike and self.shards.differing({rank: digests[rank] for rank in voters}):
                return self._on_corruption(digests, voters, self._decision.target, 0, now)
            return self._end(problem, now)
        self.stage, self._deadline, self._restore_failures = Stage.TRAINING, None, 0
        for process in self.members.by_rank().values():
            process.replacement = False
        self.members.predecessors.clear()
        if self._decision.targets:
            self._standby_failures = 0
        notice = Notice(why=self.ledger.describe_recovery(now), level="info")
        self.ledger.resumed(now)
        out: list[Command] = [
            Resume(
                audience=Audience.MEMBERS,
                generation=self.generation,
                why=f"all ranks hold version {self._decision.target} "
                f"({self.shards.digest([report.state_digest for report in reports])})",
            )
        ]
        self._to_resume = set(self.audience(Audience.MEMBERS))
        return [*out, notice, *self._surplus()]

    def _on_step_resumed(self, event: ev.StepResumed, now: float) -> list[Command]:
        """A new standby is started once the interrupted step is done: its start would slow the redo down."""
        self.ledger.step_resumed(event, self.settings.world_size, now)
        self._to_resume.discard(event.process)
        return self._top_up_standbys(now) if not self._to_resume and self.stage is Stage.TRAINING else []

    def _on_restore_failed(self, event: ev.RestoreFailed, now: float) -> list[Command]:
        if self.stage is not Stage.RESTORING or event.generation != self.generation:
            return []
        if self._suspected_restore is None:  # most often the echo of a death, as with collectives
            self._suspected_restore = event
            self._deadline = now + COLLECTIVE_GRACE_SECONDS
        return []

    def _on_restore_timeout(self, now: float) -> list[Command]:
        """Nobody can be blamed for a restore that does not end; who then does not stand still, can."""
        event = self._suspected_restore
        evidence = event.evidence if event else f"not done within {self.settings.restore_timeout_seconds:g} s"
        self._restore_failures += 1
        self.ledger.failure(
            None, "communication", f"restoring: {evidence}", None, 0, self.generation, now, self._recovery_step
        )
        if self._restore_failures > MAX_RESTORE_FAILURES:
            return self._end(f"restoring failed {self._restore_failures} times in a row: {evidence}", now)
        return self._open_generation(now, self.settings.stop_timeout_seconds)

    def _on_stop_timeout(self, now: float) -> list[Command]:
        limit = self._stop_limit_seconds
        waiting = [p for p in self.members.by_rank().values() if p.name not in self._stopped]
        late = [p for p in waiting if p.asked_at + limit <= now]
        if late:
            return self._fail_late(late, f"did not stop within {limit:g} s", now)
        out = self._fill_vacancies(now)
        if self._deadline is None:
            self._deadline = min((p.asked_at + limit for p in waiting), default=now + limit)
        return out

    def _last_traceback(self) -> ev.WorkerFailed | None:
        """What the script said when the process of the last failure raised, if it did."""
        return self._tracebacks.get(self.ledger.failures[-1].process) if self.ledger.failures else None

    def _fail_late(self, late: list[Process], evidence: str, now: float) -> list[Command]:
        out: list[Command] = []
        for process in late:
            self.ledger.failure(process, "hang", evidence, process.final_position, 0, self.generation, now)
            out.append(Kill(process=process.name, why=evidence))
        return out + self._fail(late, -1, None, now)

    # --- after the controller's own death ------------------------------------------------------------------------
    def _on_controller_restarted(self, now: float) -> list[Command]:
        """Everything that the dead controller was told is known, but not which of its orders arrived.

        So the orders that still hold are given again: whoever has obeyed one already takes no notice. An unfinished
        decision is not gone on with (rule 12 of docs/PROTOCOL.md): a recovery begins again, in a new generation.
        Whoever is waited for gets all of the time again: the time without a controller was nobody's fault.
        """
        self.ledger.controller_restarts += 1
        out: list[Command] = []
        for process in self.members.processes.values():
            if process.failed and process.alive:
                out.append(Kill(process=process.name, why="again: it was declared failed"))
            elif process.alive and not process.started:
                why = "again: the order may have been lost"
                out.append(
                    Spawn(agent=process.agent, process=process.name, rank=process.rank, slot=process.slot, why=why)
                )
        if self.stage is Stage.STARTING:
            return out + self._start_again(now)
        why = "again: the controller was restarted"
        out.append(Begin(audience=Audience.MEMBERS, generation=self.generation, why=why))
        if self.stage is Stage.FINISHING:
            return [*out, Release(audience=Audience.MEMBERS, generation=self.generation, why=why)]
        if self.stage is Stage.TRAINING:
            self._deadline = None if self._suspected_collective is None else now + COLLECTIVE_GRACE_SECONDS
            notice = Notice(why="the controller is back; training went on meanwhile", level="info")
            return [*out, Resume(audience=Audience.MEMBERS, generation=self.generation, why=why), notice]
        stop = self._stop_everyone("the controller died during the recovery, so it begins again", now)
        notice = Notice(why=f"the controller is back; {stop.why}, as generation {self.generation}", level="warning")
        out += [stop, notice]
        for rank, process in self.members.by_rank().items():
            if process.replacement:  # a standby that has never heard of its rank hears no Stop either
                out.append(Assign(process=process.name, rank=rank, generation=self.generation, why=why))
        return out + self._fill_vacancies(now)

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

    # --- the end -----------------------------------------------------------------------------------------------
    def _on_done(self, event: ev.TrainingDone, now: float) -> list[Command]:
        if self.stage is not Stage.TRAINING or event.generation != self.generation:
            return []
        if not self._is_member(event.process):
            return []
        self._done[event.process] = event
        if len(self._done) < self.settings.world_size:
            return []
        reports = sorted(self._done.values(), key=lambda e: e.rank)
        for report in reports[1:]:
            if (report.version, report.lineage) != (reports[0].version, reports[0].lineage):
                return self._end(
                    f"rank {report.rank} finished at version {report.version}, rank 0 at {reports[0].version}", now
                )
        digests = {report.rank: report.state_digest for report in reports}
        if self.shards.differing(digests):
            return self._on_corruption(digests, digests, reports[0].version, 0, now)
        self.stage, self._deadline = Stage.FINISHING, None
        self.ledger.finished(reports, self.shards.digest([report.state_digest for report in reports]), now)
        out: list[Command] = [
            Release(audience=Audience.MEMBERS, generation=self.generation, why="every rank committed its last step")
        ]
        for standby in self.members.standbys():
            self.members.fail(standby)
            out.append(Kill(process=standby.name, why="training finished"))
        return out

    def _end(self, error: str, now: float, raised: ev.WorkerFailed | None = None) -> list[Command]:
        self.stage, self._deadline = Stage.ENDED, None
        self.ledger.ended(error, now)
        details = raised.traceback if raised else ""
        self.ended = EndJob(error=error, details=details, why=error or "training finished")
        return [self.ended]

    def _is_member(self, name: str) -> bool:
        process = self.members.processes.get(name)
        return process is not None and process.alive and not process.failed and process.rank is not None


def _is_doomed(process: Process) -> bool:
    """It was ordered to be killed, and is not known to have ended."""
    return process.failed and process.alive and not process.gone


def _kind_of_exit(event: ev.ProcessExited) -> str:
    if "out-of-memory" in event.evidence:
        return "out of memory"
    return "killed" if (event.exit_status or 0) < 0 else "exited"


def _derived(reports: Sequence[ev.Stopped], private: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """Lost ranks of whose private state nothing is left, not even the page: their host is gone.

    All ranks run the same script. If the private state of the intact ones is but a function of rank and step, so is
    that of the lost ones, for any version.
    """
    intact = [report for report in reports if not report.blank and not report.torn]
    if not all(report.derivable for report in intact):
        return ()
    return tuple(rank for rank, versions in sorted(private.items()) if not versions)


def _startup_mismatch(reports: list[ev.TrainingEntered], shards: Shards) -> str:
    """Why the initial ranks cannot train together, or an empty string."""
    first = reports[0]
    for other in reports[1:]:
        if other.layout_digest != first.layout_digest:
            return (
                f"rank {other.rank} has other parameters or optimizer settings than rank {first.rank} (names, shapes "
                "or dtypes differ); every rank must build the same model"
            )
        if other.until != first.until:
            return f"rank {other.rank} wants {other.until} steps, rank {first.rank} wants {first.until}; use one number"
    different = content_mismatch(shards, [f"{report.version} {report.state_digest}" for report in reports])
    if different:
        first, other = (reports[rank] for rank in different)
        part = f" (both hold part {first.shard})" if shards.divided else ""
        return (
            f"the state of rank {other.rank} ({other.state_digest}) differs from that of rank {first.rank} "
            f"({first.state_digest}){part}: wrap the model in DDP, or seed every rank alike before building it"
        )
    return ""


def _handshake_mismatch(reports: list[ev.Restored], target: int, shards: Shards) -> str:
    """Why the members must not train on together (rule 8), or an empty string."""
    peers: dict[str, ev.Restored] = {}  # the first holder of each part of the state
    for report in reports:
        peer = peers.setdefault(shards.key(report.rank), report)
        if report.version != target:
            return f"rank {report.rank} is at version {report.version} after a restore to {target}"
        for what, first in (("lineage", reports[0]), ("layout_digest", reports[0]), ("state_digest", peer)):
            mine, theirs = getattr(report, what), getattr(first, what)
            if mine != theirs:
                return (
                    f"after the restore to version {target}, {what.replace('_', ' ')} of rank {report.rank} is {mine}, "
                    f"of rank {first.rank} {theirs}: halting rather than training on replicas that differ"
                )
    return ""
