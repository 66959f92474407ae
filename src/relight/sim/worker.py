"""A model of one worker process: what relight.training does, without torch.

Modelled, not production: training.py, barrier.py, recovery.py and runtime.py run in threads around torch, so their
order of actions is written down here a second time, as a table of *points*, places where the main thread pauses or
waits. The restore server, which has threads of its own, is modelled too. What is *decided* in a job is decided by the
production controller, which this worker obeys.

A worker is a plain value: it holds no clock, no queue and no closure, so it can be copied and compared. That is what
lets the same model run in virtual time (timed.py) and under a search of all orders (exhaustive.py).
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from relight.core import events as ev
from relight.core.commands import Assign, Begin, Release, Restore, Resume, Rung, Save, Stop, WorkerCommand
from relight.core.position import Phase
from relight.sim.contents import (
    FIRST_STATE,
    State,
    Violation,
    contribution,
    derived_private,
    digest_of,
    first_private,
    next_private,
    part_key,
    reduce,
)
from relight.sim.lower import Lower, Saved
from relight.sim.network import Copying, Group, Rendezvous
from relight.sim.page import Page
from relight.sim.points import CONNECT_SECONDS, PATIENCE_SECONDS, PAUSES


class World(Protocol):
    """What a worker needs of the simulated job around it."""

    world_size: int
    until: int
    now: float
    several_hosts: bool
    derivable: bool
    parts: int

    def plan_step(self, worker: "Worker") -> None: ...
    def plan_patience(self, worker: "Worker", seconds: float) -> None: ...
    def plan_background(self, worker: "Worker", what: str, version: int) -> None: ...
    def make_lower(self, worker: "Worker") -> Lower | None: ...
    def find_kept(self, worker: "Worker", rank: int, version: int) -> Saved | None: ...
    def saves(self, worker: "Worker", save: Save) -> None: ...
    def is_saved(self, save: Save) -> bool: ...
    def shown(self) -> int: ...
    def established(self, version: int) -> None: ...
    def keeps(self, worker: "Worker", snapshots: Sequence[Saved]) -> None: ...
    def reads(self, worker: "Worker", pieces: Mapping[int, Saved]) -> None: ...
    def send(self, worker: "Worker", event: ev.Event) -> None: ...
    def find(self, name: str) -> "Worker | None": ...
    def group(self, generation: int) -> Group: ...
    def rendezvous(self, generation: int) -> Rendezvous | None: ...
    def entered(self, group: Group, number: int) -> None: ...
    def left(self, group: Group, rank: int) -> None: ...
    def joined(self, meeting: Rendezvous) -> None: ...
    def choose_source(self, target: "Worker", restore: Restore) -> str: ...
    def asked(self, target: "Worker") -> None: ...
    def offered(self, source: "Worker") -> None: ...
    def ended(self, worker: "Worker", status: int) -> None: ...
    def began_step(self, worker: "Worker") -> None: ...
    def committed(self, worker: "Worker") -> None: ...
    def overwrites(self, worker: "Worker") -> None: ...
    def published(self, worker: "Worker", version: int, content: int) -> None: ...


class Worker:
    """One process, from its start to its end."""

    # Variants that the real worker must not have; see mutations.py.
    claims_private: ClassVar[bool] = True
    finishes_writes: ClassVar[bool] = True
    has_barrier: ClassVar[bool] = True
    keeps_private_before_barrier: ClassVar[bool] = True
    restores_in_place: ClassVar[bool] = False
    confirms_early: ClassVar[bool] = False
    lower_kind: ClassVar[type[Lower]] = Lower

    __slots__ = (
        "alive",
        "awake",
        "blank",
        "closed",
        "content",
        "copying",
        "first_after_recovery",
        "frozen",
        "generation",
        "gradient",
        "group_generation",
        "hung",
        "is_standby",
        "last_report",
        "lower",
        "meeting_generation",
        "name",
        "newest",
        "next_private",
        "offer",
        "operation",
        "orders",
        "page",
        "point",
        "prepared",
        "private",
        "rank",
        "restore",
        "resume_on_thaw",
        "staged",
        "standing_in",
        "started",
        "state",
        "stop_seen",
        "struck",
        "ticket",
        "unread",
        "waits_on",
        "world",
    )

    def __init__(self, world: World, name: str, rank: int | None) -> None:
        self.world = world
        self.name = name
        self.rank = -1 if rank is None else rank
        self.is_standby = rank is None
        self.alive = True
        self.frozen = False  # SIGSTOP: no thread of it runs
        self.hung = False  # its main thread never comes back; the others run
        self.struck = False  # some fault has struck this process
        self.page = Page()
        # what the main thread owns
        self.blank = self.is_standby
        self.state = FIRST_STATE
        self.private = 0
        self.generation = 0
        self.standing_in = 0  # the generation for which it has reported where it stands; 0: it moves
        self.stop_seen = 0  # newest generation when it began to report
        self.started = -1  # newest step that was started
        self.prepared = -1  # while it stands at the barrier
        self.next_private = 0
        self.gradient = 0
        self.restore: Restore | Save | None = None
        self.first_after_recovery = False
        self.group_generation = 0  # of the group it is attached to; 0: none
        self.operation = -1  # number of the collective it waits in
        self.staged = -1  # version that it publishes, and that engines hold back
        self.content = 0  # of that version
        # what the link thread owns
        self.newest = 0
        self.closed = False
        self.last_report: ev.Event | None = None
        self.orders: dict[type, Any] = {}
        self.unread: list[WorkerCommand] = []
        self.meeting_generation = 0  # of the group it is forming; 0: none
        self.copying: Copying | None = None
        self.lower = world.make_lower(self)  # below replicas; None: there is nothing
        # the restore server
        self.offer: tuple[int, State] | None = None  # (generation, state)
        # the engine
        self.point = "START"
        self.ticket = 0  # goes up whenever the main thread moves: what was planned for an older one is void
        self.awake = False  # it is planned that the main thread moves
        self.resume_on_thaw = False
        self.waits_on = False  # its patience has ended once, and it waits for something else

    def copy(self, world: World) -> "Worker":
        """The same, to go on with in another world."""
        twin = type(self).__new__(type(self))
        for name in Worker.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.world = world
        twin.page = self.page.copy()
        twin.orders = self.orders.copy()
        twin.unread = self.unread.copy()
        twin.copying = self.copying.copy() if self.copying is not None else None
        return twin

    def key(self) -> Hashable:
        """What the future of this process depends on; of a dead one, only its page."""
        if not self.alive:
            return self.name, self.rank, self.page.key()
        copying = self.copying
        orders = ()
        if self.closed:  # what is older than the newest Stop is not obeyed any more
            orders = tuple([o for o in (self.orders.get(Restore), self.orders.get(Resume)) if o and self._is_new(o)])
        return (
            self.name,
            self.rank,
            self.point,
            self.state,
            self.private,
            self.blank,
            self.is_standby,
            self.frozen,
            self.hung,
            self.struck,
            self.generation,
            self.standing_in,
            self.stop_seen,
            self.started,
            self.prepared,
            self.gradient,
            self.restore,
            self.first_after_recovery,
            self.group_generation,
            self.operation,
            self.staged,
            self.newest,
            self.closed,
            self.meeting_generation,
            self.offer,
            self.awake,
            None if copying is None else copying.key(),
            orders,
            Begin in self.orders,
            Assign in self.orders,
            Release in self.orders,
            tuple(self.unread),
            self.page.key(),
        )

    def _is_new(self, order: Restore | Resume) -> bool:
        return order.generation >= self.newest

    # --- engine: the main thread moves from point to point ------------------------------------------------------
    @property
    def healthy(self) -> bool:
        """Alive, and nothing was ever done to it."""
        return self.alive and not self.struck

    def poke(self) -> None:
        """Something changed: if the main thread can move on now, that is planned."""
        if self.alive and not self.awake and (self.point in PAUSES or self._can_go()):
            self.awake = True
            self.world.plan_step(self)

    def wake(self, ticket: int) -> None:
        """What was planned for the main thread comes due."""
        if not self.alive or ticket != self.ticket:
            return
        if self.frozen or self.hung:
            self.resume_on_thaw = True
            return
        self.awake = False
        getattr(self, _HANDLERS[self.point])()

    def lose_patience(self, ticket: int) -> None:
        """The wait that began with this ticket has lasted for as long as it may."""
        if not self.alive or ticket != self.ticket or self.awake or self.frozen or self.hung:
            return
        if self.point == "VERDICT":
            self.raise_in_script(f"RuntimeError: rank {self.rank}: connection reset, and nobody said why")
        elif self.point == "COPY":
            self._fail_restore("no answer from the source")
        elif self.point == "PRIVATE":
            self._lack_private()
        elif self.point == "REFORM":
            meeting = self.world.rendezvous(self.meeting_generation)
            if not self.waits_on and meeting is not None and meeting.complete:
                self.waits_on = True  # all have come: now it is the connections that it waits for
                self.world.plan_patience(self, CONNECT_SECONDS - PATIENCE_SECONDS["REFORM"])
                return
            self._fail_restore("the new process group could not be formed")

    def _go_to(self, point: str) -> None:
        self.point = point
        self.ticket += 1
        self.awake = self.waits_on = False
        if point in PAUSES:
            self.awake = True
            self.world.plan_step(self)
            return
        if point in PATIENCE_SECONDS:
            self.world.plan_patience(self, PATIENCE_SECONDS[point])
        self.poke()

    def _can_go(self) -> bool:
        """Whether what the main thread waits for is here."""
        match self.point:
            case "GRADIENT" | "BARRIER":
                operation = self.world.group(self.group_generation).operations.get(self.operation)
                return operation is None or self.rank in operation.outcome
            case "VERDICT":
                return self.closed
            case "PARKED":
                ordered = self._has(Restore, self.stop_seen) or self._has(Save, self.stop_seen)
                return ordered or self.newest > self.stop_seen
            case "COPY":
                return self.copying is not None and self.copying.over
            case "PRIVATE":
                assert self.restore is not None
                here = self.page.read_private(self.restore.target) is not None
                return here or self.newest > self.restore.generation
            case "REFORM":
                assert self.restore is not None
                return self.newest > self.restore.generation or self._is_formed(self.restore.generation)
            case "RESTORED":
                assert self.restore is not None
                generation = self.restore.generation
                return self._has(Resume, generation) or self.newest > generation
            case "SAVING":
                assert isinstance(self.restore, Save)
                return self.newest > self.restore.generation or self.world.is_saved(self.restore)
            case "FAILED":
                assert self.restore is not None
                return self.newest > self.restore.generation
            case "DONE":
                return Release in self.orders or self.closed
            case "START" | "IDLE":
                return Assign in self.orders
            case "ENTERED":
                return Begin in self.orders or self.closed
        return False

    def _has(self, kind: type, generation: int) -> bool:
        order = self.orders.get(kind)
        return order is not None and order.generation == generation

    def _is_formed(self, generation: int) -> bool:
        if self.meeting_generation != generation:
            return False
        meeting = self.world.rendezvous(generation)
        return meeting is not None and self.rank in meeting.connected

    def _stamp(self, phase: Phase) -> None:
        page = self.page
        page.phase = phase
        page.progress += 1
        page.stamp_ns = int(self.world.now * 1e9) + 1

    # --- what a fault does --------------------------------------------------------------------------------------
    def die(self, status: int) -> None:
        """The process ends, for whatever reason."""
        if not self.alive:
            return
        self.alive = False
        self.ticket += 1
        self._break_connections()
        self._leave_meeting()
        self.offer = None
        self.world.offered(self)
        self.world.ended(self, status)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT: first the link thread reads what has come meanwhile."""
        if not self.alive or not self.frozen:
            return
        self.frozen = False
        unread, self.unread = self.unread, []
        for message in unread:
            self.receive(message)
        if self.resume_on_thaw:
            self.resume_on_thaw = False
            self.world.plan_step(self)
        self.world.offered(self)

    def raise_in_script(self, summary: str) -> None:
        """bootstrap.py: report, then leave."""
        self.world.send(
            self,
            ev.WorkerFailed(
                process=self.name,
                rank=self.rank,
                kind="exception",
                step=self.page.step,
                phase=self.page.phase.name,
                summary=summary,
                traceback=f"Traceback ...\n{summary}",
                noticed_ns=1,
            ),
        )
        self._go_to("RAISED")

    def _exit_failed(self) -> None:
        self.die(1)

    def cut(self) -> None:
        """Lose all connections, and live."""
        self._break_connections()

    # --- link thread --------------------------------------------------------------------------------------------
    def receive(self, message: WorkerCommand) -> None:
        """Runtime._receive."""
        if not self.alive:
            return
        if self.frozen:
            self.unread.append(message)
            return
        if isinstance(message, Stop):
            if message.generation <= self.newest:
                return
            self.newest = message.generation
            self._close()
        elif isinstance(message, Assign):
            self.newest = max(self.newest, message.generation)
            self.orders[Assign] = message
        elif message.generation >= self.newest:
            self.orders[type(message)] = message
        self.poke()

    def _close(self) -> None:
        self.closed = True
        self._break_connections()
        self._leave_meeting()
        if self.copying is not None and not self.copying.over:
            self.copying.failed = "cancelled"
        if self.offer is not None and self.offer[0] < self.newest:
            self.offer = None
        self.world.offered(self)

    def _break_connections(self) -> None:
        if self.group_generation:
            self.world.left(self.world.group(self.group_generation), self.rank)

    def _leave_meeting(self) -> None:
        if self.meeting_generation:
            meeting = self.world.rendezvous(self.meeting_generation)
            if meeting is not None and self.rank in meeting.present:
                meeting.absent.add(self.rank)
                self.world.left(meeting.group, self.rank)

    def _report(self, event: ev.Event) -> None:
        self.last_report = event
        self.world.send(self, event)

    # --- life before and beside training ------------------------------------------------------------------------
    def begin(self) -> None:
        """The process starts: a rank waits to be told its number, a standby runs the script at once."""
        self._stamp(Phase.STARTING)
        if self.is_standby:
            self._go_to("LOADING")
        else:
            self.poke()

    def _on_start(self) -> None:
        self._take_assignment(self.orders[Assign])
        self.group_generation = self.generation
        self._go_to("LOADING")

    def _on_loaded(self) -> None:
        if self.is_standby:
            self._go_to("WARMUP")
            return
        self.private = first_private(self.rank)
        self.page.keep_private(0, self.private)
        self._report(
            ev.TrainingEntered(
                process=self.name,
                rank=self.rank,
                version=0,
                layout_digest="layout",
                state_digest=self._digest(),
                until=self.world.until,
                shard=part_key(self.rank, self.world.parts),
                buddy_every=self.lower.buddy_every if self.lower is not None else 0,
                checkpoint_every=self.lower.checkpoint_every if self.lower is not None else 0,
            )
        )
        self._go_to("ENTERED")

    def _digest(self) -> str:
        return digest_of(self.state.content, self.rank, self.world.parts)

    def _on_begin(self) -> None:
        if self.lower is not None and Begin in self.orders:
            self.lower.assign(self.orders[Begin].buddies)
        self._offer_step()

    def _on_warm(self) -> None:
        self._stamp(Phase.STANDBY)
        self._report(ev.StandbyReady(process=self.name, layout_digest="layout"))
        self._go_to("IDLE")

    def _on_promoted(self) -> None:
        self._take_assignment(self.orders[Assign])
        self._go_to("PROMOTED")

    def _on_first_recovery(self) -> None:
        self.closed = True
        self._recover()

    def _take_assignment(self, assign: Assign) -> None:
        self.rank = self.page.rank = assign.rank
        self.generation = self.page.generation = assign.generation

    # --- the loop -----------------------------------------------------------------------------------------------
    def _offer_step(self) -> None:
        """Training._offer and, after the last step, Training._finish."""
        if self.closed:
            self._recover()
        elif self.state.version < self.world.until:
            self.page.step = self.page.version = self.state.version
            self._stamp(Phase.OUTSIDE)
            if self.lower is not None:
                self.lower.between_steps()
            self._publish()
            self._go_to("OUTSIDE")
        else:
            self._finish()

    def _begin_step(self) -> None:
        self.page.prepared = self.prepared = -1
        self.started = self.page.step = self.state.version
        self._stamp(Phase.FORWARD)
        self.world.began_step(self)
        self._go_to("FORWARD")

    def _run_forward(self) -> None:
        if self.closed:
            self._recover()
            return
        self._stamp(Phase.BACKWARD)
        if not self._enter("GRADIENT", contribution(self.state, self.private, self.rank)):
            self._recover()

    def _enter(self, kind: str, contribution: int) -> bool:
        """Begin a collective. False if the generation is closed, so that it breaks at once."""
        if self.closed:
            return False
        group = self.world.group(self.group_generation)
        self.page.collectives += 1
        self.operation = group.enter(self.rank, (kind, self.state.version, self.state.content), contribution)
        self.world.entered(group, self.operation)
        self._go_to(kind)
        return True

    def _outcome(self) -> dict[int, int] | None:
        """Everyone's contributions, or None if the collective broke."""
        operation = self.world.group(self.group_generation).operations.get(self.operation)
        if operation is None or not operation.outcome[self.rank]:
            return None
        return operation.entered

    def _on_gradient(self) -> None:
        contributions = self._outcome()
        if contributions is None:
            self._await_stop()
        elif self.closed:
            self._recover()
        else:
            self.gradient = reduce(contributions)
            self.next_private = next_private(self.private, self.state.version)
            self.page.forget_private(self.state.version + 1)
            self._go_to("PREPARE")

    def _await_stop(self) -> None:
        """Runtime.await_stop: a collective broke; the Stop that explains it is here, or on its way."""
        if self.closed:
            self._recover()
            return
        self._go_to("VERDICT")
        self.say_again()

    def say_again(self) -> None:
        """Runtime.report_broken_collective; also to an agent that was restarted, as Runtime._say_again does."""
        if self.point == "VERDICT" and not self.closed:
            self.world.send(
                self,
                ev.CollectiveFailed(
                    process=self.name,
                    rank=self.rank,
                    generation=self.generation,
                    step=self.state.version,
                    summary="connection reset",
                    noticed_ns=1,
                ),
            )

    # --- barrier and write --------------------------------------------------------------------------------------
    def _on_kept(self) -> None:
        if self.keeps_private_before_barrier:
            self.page.keep_private(self.state.version + 1, self.next_private)
        self.page.prepared = self.prepared = self.state.version
        if self.confirms_early:
            self._stage(self.state.updated(self.gradient))
            self._confirm(self.state.version + 1)
        self._go_to("READY")

    def _enter_barrier(self) -> None:
        self._stamp(Phase.BARRIER)
        if not self.has_barrier:
            self._write()
        elif not self._enter("BARRIER", 1 if self.lower is None else self.lower.vote()):
            self._recover()

    def _on_barrier(self) -> None:
        votes = self._outcome()
        if votes is None:
            self._await_stop()
            return
        if self.lower is not None:
            self.lower.count(sum(votes.values()))
        self._confirm(self.state.version)
        self._write()

    def _write(self) -> None:
        self.prepared = -1
        if not self.keeps_private_before_barrier:
            self.page.keep_private(self.state.version + 1, self.next_private)
        self.page.torn = True
        self._stamp(Phase.OPTIMIZER)
        self._go_to("OPTIMIZER")

    def _on_written(self) -> None:
        if self.closed and not self.finishes_writes and self.restore is None:
            self._recover(torn=True)
            return
        self._go_to("AFTER_WRITE")

    def _commit(self) -> None:
        self.state = self.state.updated(self.gradient)
        self.private = self.next_private
        page = self.page
        page.version, page.torn = self.state.version, False
        page.commits += 1
        self._stamp(Phase.OUTSIDE)
        self.world.committed(self)
        if self.first_after_recovery:
            self.first_after_recovery = False
            self.world.send(
                self,
                ev.StepResumed(
                    process=self.name,
                    rank=self.rank,
                    generation=self.generation,
                    step=self.started,
                    resumed_ns=1,
                    forward_ns=2,
                    commit_ns=3,
                ),
            )
        self._go_to("AFTER_STEP")

    def _after_step(self) -> None:
        if self.restore is not None or self.closed:
            self._recover()
        else:
            self._offer_step()

    # --- publishing (training/publishing.py) --------------------------------------------------------------------
    def _publish(self) -> None:
        # After a fall engines may have newer versions: they keep them.
        is_new = self.lower is None or self.world.shown() <= self.state.version
        if self.rank == 0 and not self.is_standby and self.staged != self.state.version and is_new:
            self._stage(self.state)

    def _stage(self, state: State) -> None:
        self.staged, self.content = state.version, state.content

    def _confirm(self, version: int) -> None:
        """Every rank is known to hold `version`: the engines may answer with it."""
        if self.rank == 0 and 0 <= self.staged <= version:
            self.world.published(self, self.staged, self.content)

    # --- a recovery ---------------------------------------------------------------------------------------------
    def _recover(self, *, torn: bool = False) -> None:
        """Recovery.run: obey the order in hand if it is still the newest, else say where this rank stands."""
        if self.restore is not None and self.newest <= self.restore.generation:
            self._stamp(Phase.PARKED)
            self._go_to("OBEY")
            return
        self.restore = None
        self.page.torn = torn or (self.page.torn and self.blank)
        self._stamp(Phase.PARKED)
        self.stop_seen = self.newest
        self._go_to("STOP")

    def _stand_still(self) -> None:
        """Runtime.report_standing."""
        generation = self.stop_seen
        self.page.generation = generation
        self.page.collectives = 0
        self._report(
            ev.Stopped(
                process=self.name,
                rank=self.rank,
                generation=generation,
                step=self.started,
                version=self.state.version,
                lineage=self.state.lineage,
                prepared=self.prepared if self.prepared == self.state.version else -1,
                torn=self.page.torn and not self.blank,
                blank=self.blank,
                stop_seconds=0.0,
                derivable=self.world.derivable,
                restore_address=self.name,
                snapshots=self.lower.held() if self.lower is not None else (),
                checkpoints=self.lower.checkpoints() if self.lower is not None else (),
            )
        )
        self.standing_in = generation
        self._go_to("PARKED")

    def _on_parked(self) -> None:
        """The order comes first, even if a newer Stop is here too."""
        self.standing_in = 0
        kind = Restore if self._has(Restore, self.stop_seen) else Save
        if not self._has(kind, self.stop_seen):
            self.stop_seen = self.newest
            self._go_to("STOP")
            return
        restore = self.restore = self.orders[kind]
        if self.prepared == self.state.version and not self.blank:
            self.prepared = -1  # it leaves the barrier, one way or the other
            if restore.target == self.state.version + 1:
                self._go_to("FINISH")
                return
        if self.page.torn and not self.blank:
            raise Violation("I13: a recovery went on with a state that is half written")
        self._recover()

    def _finish_alone(self) -> None:
        self._confirm(self.state.version)
        self._write()

    def _obey(self) -> None:
        """Recovery._obey."""
        restore = self.restore
        assert restore is not None
        if isinstance(restore, Save):
            self._save(restore)
            return
        if self.lower is not None:
            self.lower.history = restore.history
        self._begin_forming(restore.generation)
        if restore.rung is not Rung.REPLICA:
            self._go_down(restore)
        elif self.rank in restore.targets:
            self._copy(restore)
        elif self.state.version != restore.target:
            self._fail_restore(f"rank {self.rank} is at version {self.state.version}, not {restore.target}")
        else:
            if restore.targets and self.newest <= restore.generation:
                self.offer = (restore.generation, self.state)
                self.world.offered(self)
            self._go_to("ROLLBACK")

    def _save(self, save: Save) -> None:
        """Recovery._save: its part of a last checkpoint. The one that completes it says so, or who cannot."""
        self.world.saves(self, save)
        self._go_to("SAVING" if self.rank == save.rank else "FAILED")

    def _on_saved(self) -> None:
        assert isinstance(self.restore, Save)
        if self.newest > self.restore.generation:
            self._supersede()
            return
        generation, version = self.restore.generation, self.restore.target
        self.world.send(self, ev.Saved(process=self.name, generation=generation, version=version, path="there"))
        self._go_to("FAILED")

    def _go_down(self, restore: Restore) -> None:
        """Recovery._go_down: back to a snapshot or a checkpoint. From here until it is done this rank is blank."""
        lower = self.lower
        assert lower is not None
        is_there = not (self.blank or self.page.torn) and self.state.version == restore.target
        is_target = self.rank in restore.targets
        self.blank = self.page.torn = True
        lower.fall(restore.target)
        self.staged = -1
        self.page.words = [-1, -1]
        saved = None
        if restore.rung is Rung.CHECKPOINT:
            pieces = lower.disk.complete[restore.target]
            self.world.reads(self, pieces)
            saved = None if is_target else pieces[self.rank]
        elif not is_target:
            saved = lower.kept_of(self.rank, restore.target)
            if saved is None and is_there:  # this recovery began again, and it had gone back before
                self.blank = self.page.torn = False
                self.page.words[restore.target % 2] = restore.target
                self._go_to("ROLLBACK")
                return
        if saved is not None:
            self._take_back(restore, saved)
            if restore.rung is Rung.CHECKPOINT:
                self.offer = (restore.generation, self.state)
                self.world.offered(self)
            self._go_to("ROLLBACK")
            return
        if restore.rung is Rung.CHECKPOINT:
            self._copy(restore)
            return
        own = [source for source in restore.sources if source.of == self.rank]
        part = part_key(self.rank, self.world.parts)
        found = own or [source for source in restore.sources if source.shard == part]
        if not found or self.newest > restore.generation:
            self._fail_restore("no source has a snapshot of its part")
            return
        self.copying = Copying(found[0].address, restore.generation, restore.target, found[0].of)
        self.world.asked(self)
        self._go_to("COPY")

    def _take_back(self, restore: Restore, saved: Saved) -> None:
        """Recovery._stand_at."""
        if restore.rung is Rung.BUDDY:
            self.world.keeps(self, [saved])
        target = restore.target
        private = saved.private
        if self.rank in restore.derived:
            private = derived_private(self.rank, target, known=self.world.derivable)
        self.state, self.private, self.copying = saved.state, private, None
        self.page.slots[target % 2] = (target, private)
        self.page.words[target % 2] = target
        self.blank = self.page.torn = False
        self.page.version = self.state.version

    def _begin_forming(self, generation: int) -> None:
        self.group_generation = self.meeting_generation = 0
        meeting = self.world.rendezvous(generation) if self.newest <= generation else None
        if meeting is not None:
            meeting.join(self.rank)
            self.meeting_generation = generation
            self.world.joined(meeting)

    def _copy(self, restore: Restore) -> None:
        self.world.overwrites(self)
        self.page.torn = True
        if self.restores_in_place:  # half of it is there, and it says so of all
            self.state = self.state._replace(version=restore.target, content=-1)
            self.blank = self.page.torn = False
        if self.newest > restore.generation or not restore.sources:
            self._fail_restore("cancelled")
            return
        source = self.world.choose_source(self, restore)
        if not source and self.world.parts > 1:
            self._fail_restore("nobody serves its part")
            return
        self.copying = Copying(source, restore.generation, restore.target)
        self.world.asked(self)
        self._go_to("COPY")

    def _on_copied(self) -> None:
        assert self.copying is not None
        if self.copying.failed or self.copying.state is None:
            self._fail_restore(self.copying.failed)
        else:
            self._go_to("TAKE_OVER")

    def _take_over(self) -> None:
        assert isinstance(self.restore, Restore)
        assert self.copying is not None
        assert self.copying.state is not None
        target = self.restore.target
        if self.copying.saved is not None:
            self._take_back(self.restore, self.copying.saved)
            self._go_to("ROLLBACK")
            return
        if self.lower is not None and self.restore.rung is Rung.CHECKPOINT:
            piece = self.lower.disk.complete[target][self.rank]
            self._take_back(self.restore, piece._replace(state=self.copying.state))
            self._go_to("ROLLBACK")
            return
        if self.rank in self.restore.derived:
            self.page.keep_private(target, derived_private(self.rank, target, known=self.world.derivable))
        private = self.page.read_private(target)
        if private is None and self.world.several_hosts and self.point != "PRIVATE":
            self._go_to("PRIVATE")
            return
        if private is None:
            self._lack_private()
            return
        self.state, self.private, self.copying = self.copying.state, private, None
        if self.claims_private:
            self.page.words[target % 2] = target
        self.blank = self.page.torn = False
        self.page.version = self.state.version
        self._go_to("ROLLBACK")

    def _lack_private(self) -> None:
        assert self.restore is not None
        version = self.restore.target
        self._fail_restore(f"the rank-private state of version {version} is not beside this rank's page")

    def _rolled_back(self) -> None:
        assert self.restore is not None
        if self.newest <= self.restore.generation and not self.meeting_generation:
            self._fail_restore("the rendezvous of that generation is closed")
        else:
            self._go_to("REFORM")

    def _on_formed(self) -> None:
        assert self.restore is not None
        generation = self.restore.generation
        if self.newest > generation:
            self._supersede()
            return
        self._report(
            ev.Restored(
                process=self.name,
                rank=self.rank,
                generation=generation,
                version=self.state.version,
                lineage=self.state.lineage,
                state_digest=self._digest(),
                layout_digest="layout",
                progress=ev.RestoreProgress(),
            )
        )
        self._go_to("RESTORED")

    def _on_resume(self) -> None:
        assert self.restore is not None
        if self._has(Resume, self.restore.generation):
            self._go_to("RESUME")
        else:
            self._supersede()

    def _open_generation(self) -> None:
        assert isinstance(self.restore, Restore)
        generation = self.restore.generation
        if self.newest > generation:
            self._supersede()
            return
        self.group_generation = self.generation = generation
        self.meeting_generation = 0
        self.copying = None
        if self.lower is not None:
            self.lower.assign(self.orders[Resume].buddies, self.restore.keep)
        self.restore = None
        self.closed = False
        self.first_after_recovery = True
        self.is_standby = False
        self.page.prepared = -1
        self._confirm(self.state.version)
        self._offer_step()

    def _supersede(self) -> None:
        self.restore = None
        self._recover()

    def _fail_restore(self, evidence: str) -> None:
        assert self.restore is not None
        self.copying = None
        self.world.send(
            self,
            ev.RestoreFailed(process=self.name, generation=self.restore.generation, evidence=evidence, culprit=""),
        )
        self._go_to("FAILED")

    # --- the end ------------------------------------------------------------------------------------------------
    def _finish(self) -> None:
        self.page.step = self.page.version = self.state.version
        self._stamp(Phase.DONE)
        self._report(
            ev.TrainingDone(
                process=self.name,
                rank=self.rank,
                generation=self.generation,
                version=self.state.version,
                lineage=self.state.lineage,
                state_digest=self._digest(),
                cut_collectives=0,
            )
        )
        self._go_to("DONE")

    def _on_done(self) -> None:
        if Release in self.orders and not self.closed:
            if self.rank == 0:
                self._stage(self.state)
                self._confirm(self.state.version)
            self._go_to("RELEASED")
        else:
            self._recover()

    def _on_released(self) -> None:
        self.world.send(self, ev.WorkerReleased(process=self.name))
        self._go_to("EXITING")

    def _exit_well(self) -> None:
        self.die(0)


# What the main thread does when it leaves a point: the name of a method, so that variants may override it.
_HANDLERS: dict[str, str] = {
    "START": "_on_start",
    "LOADING": "_on_loaded",
    "ENTERED": "_on_begin",
    "WARMUP": "_on_warm",
    "IDLE": "_on_promoted",
    "PROMOTED": "_on_first_recovery",
    "OUTSIDE": "_begin_step",
    "FORWARD": "_run_forward",
    "GRADIENT": "_on_gradient",
    "PREPARE": "_on_kept",
    "READY": "_enter_barrier",
    "BARRIER": "_on_barrier",
    "VERDICT": "_recover",
    "OPTIMIZER": "_on_written",
    "AFTER_WRITE": "_commit",
    "AFTER_STEP": "_after_step",
    "STOP": "_stand_still",
    "PARKED": "_on_parked",
    "FINISH": "_finish_alone",
    "OBEY": "_obey",
    "COPY": "_on_copied",
    "TAKE_OVER": "_take_over",
    "PRIVATE": "_take_over",
    "ROLLBACK": "_rolled_back",
    "REFORM": "_on_formed",
    "RESTORED": "_on_resume",
    "RESUME": "_open_generation",
    "FAILED": "_supersede",
    "SAVING": "_on_saved",
    "DONE": "_on_done",
    "RELEASED": "_on_released",
    "EXITING": "_exit_well",
    "RAISED": "_exit_failed",
}
