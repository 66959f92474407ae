"""A simulated worker process: the production decisions of `core/worker`, carried out in virtual time.

What a real worker does with threads, sockets and tensors is done here with numbers and a table of *points*, places
where the main thread pauses or waits (points.py). `step.py` and `recovery.py` have what happens at each point, and how
each action is carried out; whatever a worker decides comes from `core/worker`.

A simulated worker is a plain value: it holds no clock, no queue and no closure, so it can be copied and compared. That
is what lets the same model run in virtual time (timed.py) and under a search of all orders (exhaustive.py).
"""

from collections.abc import Callable, Mapping
from typing import ClassVar, Self

from relight.core.protocol import events as ev
from relight.core.protocol.commands import WorkerCommand
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker.events import CollectiveBroke, Event, Interrupted
from relight.core.worker.worker import Worker
from relight.sim.model.contents import FIRST_STATE, State
from relight.sim.model.fallback_tiers import FallbackTiers
from relight.sim.model.network import Copying
from relight.sim.model.page import Page
from relight.sim.model.shapes import Shape, learner
from relight.sim.model.surroundings import Surroundings
from relight.sim.model.worker import recovery, step
from relight.sim.model.worker.points import COLLECTIVES, PATIENCE_SECONDS, PAUSE_BEFORE, PAUSES, WAITS

Continue = Callable[["SimulatedWorker"], None]
CarryOut = Callable[["SimulatedWorker", act.Action], Event | None]


class SimulatedWorker:
    """One process, from its start to its end."""

    # Planted bugs put in others; see sim/planted.
    decisions: ClassVar[type[Worker]] = Worker
    points: ClassVar[Mapping[str, Continue]] = {**step.POINTS, **recovery.POINTS}  # how the main thread leaves each
    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = {**step.CARRY_OUTS, **recovery.CARRY_OUTS}
    tiers_kind: ClassVar[type[FallbackTiers]] = FallbackTiers

    __slots__ = tuple(
        (
            "agreed alive asked_in awake content copying doubts frozen gradient group_generation has_new hung knows "
            "last_report learner lower machine meeting_generation name next_private offer operation page planned point "
            "private resume_on_thaw shared staged stalled state struck surprised ticket todo undo unread waits_on world"
        ).split()
    )

    def __init__(self, world: Surroundings, name: str, rank: int | None) -> None:
        self.world = world
        self.name = name
        self.machine = self.decisions(-1 if rank is None else rank, is_standby=rank is None, until=world.until)
        self.machine.lineage = FIRST_STATE.lineage
        self.alive = True
        self.frozen = self.hung = False  # SIGSTOP: no thread of it runs; or its main thread never comes back
        self.struck = False  # some fault has struck this process
        self.page = Page()
        self.state = FIRST_STATE
        self.private = self.next_private = self.gradient = 0
        self.undo: State | None = None  # the pre-image of what the step in flight has written before its barrier
        self.learner = learner()  # of a job whose ranks learn
        self.planned: Shape | None = None  # by what was learnt, of the step in flight
        self.knows = False  # it has been surprised, or has heard of a surprise: kept for the judge
        self.has_new = self.agreed = False  # it changes a buffer for the first time: this rank knows; all know
        self.surprised = False  # more came after the barrier of the step in flight than the last write
        self.asked_in = 0  # the generation in which it has asked whether others have left their loops
        self.group_generation = 0  # of the group it is attached to; 0: none
        self.operation = -1  # number of the collective it waits in
        self.shared = 0  # collectives that the code between two steps has completed, while it runs
        self.staged, self.content = -1, 0  # version that it publishes, and that engines hold back, and its content
        # what the link thread owns
        self.last_report: ev.Event | None = None
        self.doubts: tuple[ev.BitsDoubted, ...] = ()
        self.unread: list[WorkerCommand] = []
        self.meeting_generation = 0  # of the group it is forming; 0: none
        self.copying: Copying | None = None
        self.lower = world.make_tiers(self)  # below replicas; None: there is nothing
        self.offer: tuple[int, State, int] | None = None  # (generation, state, results of collectives after it)
        self.point = "START"
        self.todo: act.Actions = ()  # left to do after the pause at this point
        self.ticket = 0  # goes up whenever the main thread moves: what was planned for an older one is void
        self.awake = False  # it is planned that the main thread moves
        self.resume_on_thaw = False
        self.stalled: tuple[tuple[object, ...], ...] = ()  # what continues once it thaws
        self.waits_on = False  # its patience has ended once, and it waits for something else

    def copy(self, world: Surroundings) -> Self:
        """Return the same worker, to go on with in another world."""
        twin = type(self).__new__(type(self))
        for name in SimulatedWorker.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.world = world
        twin.machine = self.machine.copy()
        twin.page = self.page.copy()
        twin.unread = self.unread.copy()
        twin.copying = self.copying.copy() if self.copying is not None else None
        return twin

    # --- what others ask ----------------------------------------------------------------------------------------
    @property
    def rank(self) -> int:
        """The rank that it holds; -1: none."""
        return self.machine.rank

    @property
    def shape(self) -> Shape:
        """The shape of the step in flight."""
        return self.planned or self.world.pattern.of(self.state.version, self.machine.began)

    @property
    def holds_nothing(self) -> bool:
        """True if its state is worth nothing: it holds none, or is where nothing can be undone or finished alone."""
        return self.machine.blank or self.machine.torn or (self.machine.passed and self.surprised)

    @property
    def healthy(self) -> bool:
        """Alive, and struck by no fault."""
        return self.alive and not self.struck

    @property
    def reported_in(self) -> int:
        """The generation for which it has reported its status and does not move; 0: it moves."""
        return self.machine.reported if self.point == "PARKED" else 0

    # --- engine: the main thread moves from point to point ------------------------------------------------------
    def begin(self) -> None:
        """The process starts: a rank waits for its number, a standby runs the script at once."""
        self.stamp(Phase.STARTING)
        if self.machine.is_standby:
            self.go_to("LOADING")
        else:
            self.poke()

    def feed(self, event: Event) -> None:
        """Hand an event to the decisions, and begin to carry out what they answer."""
        self._carry_out(self.machine.handle(event))

    def _carry_out(self, actions: act.Actions, *, paused: bool = False) -> None:
        """Until a pause or a wait."""
        ticket = self.ticket
        while actions:
            action = actions[0]
            pause = PAUSE_BEFORE.get(type(action))
            if pause is not None and not paused:
                self.todo = actions
                self.go_to(pause)
                return
            paused, actions = False, actions[1:]
            event = self.carry_outs[type(action)](self, action)
            if event is not None:
                actions = self.machine.handle(event)
        if self.ticket == ticket and self.machine.state in WAITS:
            self.go_to(WAITS[self.machine.state])

    def interrupt(self) -> None:
        """The generation is closed, so what the main thread does is given up."""
        self.stamp(Phase.PARKED)
        self.feed(Interrupted())

    def want_step(self) -> None:
        """The loop asks for the next step."""
        if self.machine.closed:
            self.stamp(Phase.PARKED)
        step.want(self)

    def poke(self) -> None:
        """Something changed: if the main thread can move on now, that is planned."""
        if self.alive and not self.awake and (self.point in PAUSES or self.can_go()):
            self.awake = True
            self.world.plan_step(self)

    def wake(self, ticket: int) -> None:
        """Move the main thread, as was planned."""
        if not self.alive or ticket != self.ticket:
            return
        if self.frozen or self.hung:
            self.resume_on_thaw = True
            return
        self.awake = False
        if self.todo:
            todo, self.todo = self.todo, ()
            self._carry_out(todo, paused=True)
        else:
            self.points[self.point](self)

    def go_to(self, point: str) -> None:
        """The main thread pauses or waits there."""
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

    def can_go(self) -> bool:
        """Return whether what the main thread waits for is here."""
        if self.point in COLLECTIVES:
            operation = self.world.group(self.group_generation).operations.get(self.operation)
            return operation is None or self.rank in operation.outcome
        if self.point in recovery.READY:
            return recovery.READY[self.point](self)
        return self.machine.is_ready

    def stamp(self, phase: Phase) -> None:
        """Show a phase on the page."""
        page = self.page
        page.phase = phase
        page.progress += 1
        page.stamp_ns = int(self.world.now * 1e9) + 1

    def report(self, event: ev.Event) -> None:
        """Say something that is said again to an agent's successor."""
        self.last_report = event
        self.world.send(self, event)

    # --- the link thread ----------------------------------------------------------------------------------------
    def receive(self, message: WorkerCommand) -> None:
        """An order arrives."""
        if not self.alive:
            return
        if self.frozen:
            self.unread.append(message)
            return
        for action in self.machine.handle(message):
            self.carry_outs[type(action)](self, action)
        self.poke()

    def await_stop(self) -> None:
        """A collective broke; the Stop that explains it is here, or on its way."""
        actions = self.machine.handle(CollectiveBroke())
        if not actions:
            self.interrupt()
            return
        self.go_to("VERDICT")
        self._carry_out(actions)

    def say_again(self) -> None:
        """Also to an agent that was restarted."""
        for doubt in self.doubts:
            self.world.send(self, doubt)
        if self.point in ("VERDICT", "UNSHARED"):
            self._carry_out(self.machine.handle(CollectiveBroke()))

    # --- what a fault does --------------------------------------------------------------------------------------
    def die(self, status: int) -> None:
        """The process ends, for whatever reason."""
        if not self.alive:
            return
        self.alive = False
        self.ticket += 1
        recovery.vanish(self)
        self.world.ended(self, status)

    def thaw(self) -> None:
        """SIGCONT: first the link thread reads what has come meanwhile."""
        if self.alive and self.frozen:
            self.frozen = False
            unread, self.unread = self.unread, []
            for message in unread:
                self.receive(message)
            if self.resume_on_thaw:
                self.resume_on_thaw = False
                self.world.plan_step(self)
            self.world.thawed(self)

    def raise_in_script(self, summary: str) -> None:
        """The script raises: report, then leave; or stay, if a last checkpoint may need what is here."""
        step.raise_in_script(self, summary)

    def lose_patience(self, ticket: int) -> None:
        """The wait that began with this ticket has lasted for as long as it may."""
        if not self.alive or ticket != self.ticket or self.awake or self.frozen or self.hung:
            return
        if self.point in ("VERDICT", "UNSHARED"):
            self.raise_in_script(f"RuntimeError: rank {self.rank}: connection reset, and no order explained it")
        else:
            recovery.lose_patience(self)
