"""A job at one moment of the exhaustive search: everything that may happen next, and copies of it.

With `fine`, every message waits for its turn, and a main thread is seen between steps, before the barrier and inside
the write. Without, indistinguishable orders of events are followed once, so that larger jobs can be searched:

- A report of a worker reaches the controller at once. If it came later, after another failure had opened a new
  generation, it would be ignored; coming earlier it is forgotten when that generation is opened. Deaths do wait.
- Orders that change nothing that others see arrive at once: all to a rank that is parked, but Restore to a survivor,
  which may finish a step because of it. Stop to a rank that trains does wait: what it does until then matters.
- Between two collectives a main thread does not pause. If it dies or is stopped there, it might as well have been
  inside the next collective, which then breaks on everyone, as it always may.
- A group that all ranks came to is formed at once: a rank that waits for its group and one that has it report the same.
"""

from collections import deque
from collections.abc import Callable, Sequence

from relight.core.controller import ControllerSettings, Stage
from relight.core.protocol import events as ev
from relight.core.protocol.commands import Restore
from relight.core.protocol.fault import Action as Fault
from relight.sim.model.contents import Violation
from relight.sim.model.shapes import ONE_WRITE, Pattern
from relight.sim.model.worker.recovery import break_connections
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.search import sameness
from relight.sim.search.choices import IDLE_WAITS, at_once, choices, to_the_dead
from relight.sim.search.copies import copy_controller, exact_key
from relight.sim.search.exact import exact_key as exact_worker_key
from relight.sim.timed.job import PRODUCTION, Parts
from relight.sim.world import node
from relight.sim.world.world import Action, World

_SEEN = frozenset(
    {"OUTSIDE", "FIRST_WRITE", "LAST_WRITE", "READY", "OPTIMIZER", "EXTRA_WRITE"}
)  # points at which a main thread pauses in a fine search
_MAX_UNSEEN = 10_000  # moves between two choices; a job of a few ranks takes hundreds


class Situation(World):
    """A job at one moment. `choices` is everything that may happen next; `copy` can take another way."""

    detailed_pages = False

    def __init__(
        self,
        ranks: int,
        steps: int,
        faults: int,
        kinds: Sequence[Fault],
        parts: Parts = PRODUCTION,
        *,
        fine: bool = False,
        pattern: Pattern = ONE_WRITE,
    ) -> None:
        settings = ControllerSettings(world_size=ranks, standbys=faults)
        super().__init__(settings, steps, parts.controller, parts.worker, pattern)
        self.now = 1.0
        self.kinds = tuple(kinds)
        self.fine = fine
        self.faults_left = faults
        self._moving: deque[tuple[str, int]] = deque()  # main threads that leave a point at once
        self._shared: set[str] = set()  # workers that belong to an older situation too
        self._keys: dict[str, int] = {}  # of workers that have not changed since
        self._controller_is_shared = False
        self._books: sameness.Books | None = None
        self.describer = sameness.Describer(ranks, steps, pattern)

    # --- to its beginning -----------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Go to the moment where training begins."""
        left, self.faults_left = self.faults_left, 0
        self.feed(ev.AgentJoined(agent=node.NODE, slots=self.world_size))
        while (now := self._next_of_start()) is not None:
            self.happen(now)
        self.faults_left = left

    def _next_of_start(self) -> Action | None:
        begun = self.controller.stage is Stage.TRAINING
        for choice in self.choices():
            if not begun or (choice[0] in ("up", "down") and not self._trains(choice[1])):
                return choice
        if begun:  # a standby that is still loading
            waiting = [w for w in self.workers.values() if w.point in IDLE_WAITS and w.awake]
            return ("step", waiting[0].name, waiting[0].ticket) if waiting else None
        return None

    def _trains(self, name: str) -> bool:
        worker = self.workers.get(name)
        return worker is not None and worker.rank >= 0

    # --- copies and comparison --------------------------------------------------------------------------------------
    def copy(self) -> "Situation":
        """A copy that may take another way."""
        twin = Situation.__new__(Situation)
        twin.__dict__.update(self.__dict__)
        twin.workers = self.workers.copy()
        twin._shared = set(self.workers)
        twin._keys = self._keys.copy()
        twin.checker = self.checker.copy(twin.workers)
        twin.up = {name: queue.copy() for name, queue in self.up.items() if queue}
        twin.down = {name: queue.copy() for name, queue in self.down.items() if queue}
        twin.groups = {generation: group.copy() for generation, group in self.groups.items()}
        twin.meetings = {generation: meeting.copy() for generation, meeting in self.meetings.items()}
        twin._controller_is_shared = True
        twin.agents = {name: agent.copy() for name, agent in self.agents.items()}
        twin.spawned = self.spawned.copy()
        twin.host_of = self.host_of.copy()
        twin._moving = deque()
        return twin

    def own(self, process: str) -> SimulatedWorker:
        worker = self.workers[process]
        self._keys.pop(process, None)
        if process in self._shared:
            self._shared.discard(process)
            worker = self.workers[process] = worker.copy(self)
        return worker

    def _own_controller(self) -> None:
        self._books = None
        if self._controller_is_shared:
            self._controller_is_shared = False
            self.controller = copy_controller(self.controller)

    def feed(self, event: ev.Event) -> None:
        self._own_controller()
        super().feed(event)

    def expire(self) -> None:
        self._own_controller()
        super().expire()

    def worker_key(self, name: str) -> int:
        """A key of all that a process's future depends on, but for names and ranks."""
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = self.describer.worker(self.workers[name])
        return key

    def books(self) -> sameness.Books:
        """The controller's knowledge, sorted by process."""
        if self._books is None:
            self._books = sameness.Books(self.controller, self.now)
        return self._books

    def key(self) -> int:
        """Equal for situations from which the same can follow, up to names."""
        return sameness.key(self)

    def exact_key(self) -> int:
        """Equal only for situations in which the same processes are in the same state."""
        if self.end is not None:
            return hash(self.end.error)
        return hash(
            (
                tuple([(name, exact_worker_key(worker)) for name, worker in self.workers.items()]),
                tuple([group.key() for group in self.groups.values()]),
                tuple([meeting.key() for meeting in self.meetings.values()]),
                tuple([(name, tuple(queue)) for name, queue in sorted(self.up.items()) if queue]),
                tuple([(name, tuple(queue)) for name, queue in sorted(self.down.items()) if queue]),
                self.store_generation,
                self.faults_left,
                self.suspected,
                self.checker.key(),
                exact_key(self.controller, self.now),
            )
        )

    def choices(self) -> list[Action]:
        """Everything that may happen next, in an order that is always the same."""
        return choices(self)

    # --- what happens --------------------------------------------------------------------------------------------
    def happen(self, action: Action) -> None:
        """Let one of the choices happen, and all that follows from it unseen."""
        match action[0]:
            case "expire":
                deadline = self.controller.next_deadline()
                assert deadline is not None
                self.now = max(self.now, deadline)
                self.expire()
            case "fault":
                self._strike(self.own(action[1]), action[2])
            case "suspect":
                self.suspected |= {action[1]}
                position = self.workers[action[1]].page.position(counters=False)
                self.feed(
                    ev.ProcessSuspected(
                        process=action[1], kind="frozen", evidence="it is frozen", position=position, noticed_ns=1
                    )
                )
            case "ask":
                self._ask(action[1], action[2])
            case _:
                self.perform(action)
        self._settle_down()

    def _settle_down(self) -> None:
        """Let everything happen that need not be distinguished. Raises Violation if that never ends."""
        for _ in range(_MAX_UNSEEN):
            if self.end is not None:
                return
            if self._moving:
                process, ticket = self._moving.popleft()
                self.perform(("step", process, ticket))
                continue
            action = next(to_the_dead(self) if self.fine else at_once(self), None)
            if action is None:
                return
            self.perform(action)
        raise Violation(f"L2: after {_MAX_UNSEEN} moves without a choice there is still no rest")

    suspected: frozenset[str] = frozenset()
    listener: Callable[[str, object], None] | None = None

    def note(self, what: str, thing: object) -> None:
        if self.listener is not None:
            self.listener(what, thing)

    def _strike(self, worker: SimulatedWorker, kind: Fault) -> None:
        self.faults_left -= 1
        self.checker.struck(kind, worker)
        worker.struck = True
        match kind:
            case Fault.FREEZE:
                worker.frozen = True
            case Fault.CUT:
                break_connections(worker)
            case _:
                worker.die(-9)

    # --- what the world asks of a driver ----------------------------------------------------------------------------
    def plan(self, action: Action) -> None:
        """Nothing to do: `choices` looks at what there is."""
        if action[0] == "dead":
            node.report_exit(self, action[1], action[2])

    def choose_source(self, target: SimulatedWorker, restore: Restore) -> str:  # noqa: ARG002 (any of them: see `choices`)
        return ""

    def asked(self, target: SimulatedWorker) -> None:
        if target.copying is not None and target.copying.source:
            super().asked(target)

    def _ask(self, process: str, source: str) -> None:
        target = self.own(process)
        assert target.copying is not None
        target.copying.source = source
        self.asked(target)

    def plan_step(self, worker: SimulatedWorker) -> None:
        if worker.point not in IDLE_WAITS and (not self.fine or worker.point not in _SEEN):
            self._moving.append((worker.name, worker.ticket))

    def plan_patience(self, worker: SimulatedWorker, seconds: float) -> None:
        """Deadlines of the controller are enough; those of workers are the random search's part."""
