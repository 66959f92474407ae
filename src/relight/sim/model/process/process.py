"""What a simulated process holds, and how its main thread moves from point to point.

Every other file of this folder adds what some files of relight.training do, and inherits what it needs of the others:

    process <- runtime <- writes <- steps <- recovery
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

from relight.core import events as ev
from relight.core.commands import Assign, Begin, Release, Restore, Resume, Save, WorkerCommand
from relight.core.position import Phase
from relight.sim.model.contents import FIRST_STATE, State
from relight.sim.model.fallback_tiers import FallbackTiers, Saved
from relight.sim.model.network import Copying, Group, Rendezvous
from relight.sim.model.page import Page
from relight.sim.model.points import PATIENCE_SECONDS, PAUSES
from relight.sim.model.shapes import Pattern


class World(Protocol):
    """What a worker needs of the simulated job around it."""

    world_size: int
    until: int
    now: float
    several_hosts: bool
    derivable: bool
    parts: int
    verify_every: int
    pattern: Pattern

    def plan_step(self, worker: "Process") -> None: ...
    def plan_patience(self, worker: "Process", seconds: float) -> None: ...
    def plan_background(self, worker: "Process", what: str, version: int) -> None: ...
    def make_tiers(self, worker: "Process") -> FallbackTiers | None: ...
    def find_kept(self, worker: "Process", rank: int, version: int) -> Saved | None: ...
    def saves(self, worker: "Process", save: Save) -> None: ...
    def is_saved(self, save: Save) -> bool: ...
    def shown(self) -> int: ...
    def established(self, version: int) -> None: ...
    def keeps(self, worker: "Process", snapshots: Sequence[Saved]) -> None: ...
    def reads(self, worker: "Process", pieces: Mapping[int, Saved]) -> None: ...
    def send(self, worker: "Process", event: ev.Event) -> None: ...
    def find(self, name: str) -> "Process | None": ...
    def group(self, generation: int) -> Group: ...
    def rendezvous(self, generation: int) -> Rendezvous | None: ...
    def entered(self, group: Group, number: int) -> None: ...
    def left(self, group: Group, rank: int) -> None: ...
    def joined(self, meeting: Rendezvous) -> None: ...
    def choose_source(self, target: "Process", restore: Restore) -> str: ...
    def asked(self, target: "Process") -> None: ...
    def offered(self, source: "Process") -> None: ...
    def ended(self, worker: "Process", status: int) -> None: ...
    def began_step(self, worker: "Process") -> None: ...
    def follows(self, made: int, *of: int) -> None: ...
    def committed(self, worker: "Process") -> None: ...
    def overwrites(self, worker: "Process") -> None: ...
    def published(self, worker: "Process", version: int, content: int) -> None: ...


class Process:
    """One process, from its start to its end."""

    # Variants that the real worker must not have; see mutations.py.
    claims_private: ClassVar[bool] = True
    restores_in_place: ClassVar[bool] = False
    tiers_kind: ClassVar[type[FallbackTiers]] = FallbackTiers

    handlers: ClassVar[Mapping[str, str]] = {}  # by point: the method with which the main thread leaves it

    __slots__ = (
        "agreed",
        "alive",
        "awake",
        "began",
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
        "surprised",
        "ticket",
        "undo",
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
        self.undo: State | None = None  # the pre-image of what the step in flight has written before its barrier
        self.surprised = False  # more came after the barrier of the step in flight than the last write
        self.restore: Restore | Save | None = None
        self.first_after_recovery = False
        self.began = -1  # the version with which this generation began to train
        self.agreed = -1  # the newest version of which it is known that all replicas are the same
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
        self.lower = world.make_tiers(self)  # below replicas; None: there is nothing
        # the restore server
        self.offer: tuple[int, State] | None = None  # (generation, state)
        # the engine
        self.point = "START"
        self.ticket = 0  # goes up whenever the main thread moves: what was planned for an older one is void
        self.awake = False  # it is planned that the main thread moves
        self.resume_on_thaw = False
        self.waits_on = False  # its patience has ended once, and it waits for something else

    def copy(self, world: World) -> Self:
        """The same, to go on with in another world."""
        twin = type(self).__new__(type(self))
        for name in Process.__slots__:
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
            self.undo,
            self.surprised,
            self.began if self.world.pattern.relearns else 0,
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
    def holds_nothing(self) -> bool:
        """Whether its state is worth nothing: it holds none, or it was interrupted where nothing can be undone."""
        return self.blank or (self.page.torn and self.surprised)

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
        getattr(self, self.handlers[self.point])()

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
            case "GRADIENT" | "SECOND" | "COMPARE" | "BARRIER" | "EXTRA" | "END":
                operation = self.world.group(self.group_generation).operations.get(self.operation)
                return operation is None or self.rank in operation.outcome
            case "VERDICT" | "DIFFERS":
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
            case "STAYS":
                return self.newest > self.generation
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
