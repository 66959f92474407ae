"""Every order of events of a small job, with every choice of faults: a search with memory of what it has seen.

A job begins where all ranks have entered training and all standbys are warm. From each situation the search follows
everything that may happen next: a message arrives, a main thread moves on, a collective completes on one rank or
breaks on it, a process is struck by a fault. Two orders that lead to the same situation are followed once; the same is
what differs in names only (sameness.py).

Time stands still; a deadline passes when nothing else can happen, and a fresh process gets warm only then. Deadlines
that pass early, and repeated or lost messages, are the random search's part.

With `fine`, every message waits for its turn, and a main thread is seen between steps, before the barrier and inside
the write. Without, what nobody can tell apart happens at once, so that larger jobs can be searched:

- A report of a worker reaches the controller at once. If it came later, after another failure had opened a new
  generation, it would be ignored; coming earlier it is forgotten when that generation is opened. Deaths do wait.
- Orders that change nothing that others see arrive at once: all to a rank that is parked, but Restore to a survivor,
  which may finish a step because of it. Stop to a rank that trains does wait: what it does until then matters.
- Between two collectives a main thread does not pause. If it dies or is stopped there, it might as well have been
  inside the next collective, which then breaks on everyone, as it always may.
- A group that all ranks came to is formed at once: a rank that waits for its group and one that has it report the same.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from relight.core import events as ev
from relight.core.commands import Restore, Stop
from relight.core.controller import ControllerSettings, Stage
from relight.core.fault import Action as Fault
from relight.core.position import Phase
from relight.sim.model.contents import Violation
from relight.sim.model.network import Group
from relight.sim.model.process.process import Process
from relight.sim.model.shapes import ONE_WRITE, Pattern, pattern_of
from relight.sim.model.worker import Worker
from relight.sim.planted.mutations import find_mutation
from relight.sim.search import sameness
from relight.sim.search.copies import copy_controller, exact_key
from relight.sim.world.timed import PRODUCTION, Parts, show
from relight.sim.world.world import NODE, Action, World

_IDLE_WAITS = frozenset({"LOADING"})  # left only when nothing else can happen
_SEEN = frozenset(
    {"OUTSIDE", "FIRST_WRITE", "LAST_WRITE", "READY", "OPTIMIZER", "EXTRA_WRITE"}
)  # points at which a main thread pauses in a fine search
_MAX_UNSEEN = 10_000  # moves between two choices; a job of a few ranks takes hundreds
FAULTS = {"kill": Fault.KILL, "freeze": Fault.FREEZE, "cut": Fault.CUT}


class Situation(World):
    """A job at one moment. `choices` is everything that may happen next; `copy` goes on in another way."""

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
        """Up to the moment where training begins."""
        left, self.faults_left = self.faults_left, 0
        self.feed(ev.AgentJoined(agent=NODE, slots=self.world_size))
        while (now := self._next_of_start()) is not None:
            self.happen(now)
        self.faults_left = left

    def _next_of_start(self) -> Action | None:
        begun = self.controller.stage is Stage.TRAINING
        for choice in self.choices():
            if not begun or (choice[0] in ("up", "down") and not self._trains(choice[1])):
                return choice
        if begun:  # a standby that is still loading
            waiting = [w for w in self.workers.values() if w.point in _IDLE_WAITS and w.awake]
            return ("step", waiting[0].name, waiting[0].ticket) if waiting else None
        return None

    def _trains(self, name: str) -> bool:
        worker = self.workers.get(name)
        return worker is not None and worker.rank >= 0

    # --- copies and comparison --------------------------------------------------------------------------------------
    def copy(self) -> "Situation":
        """The same, to go on with in another way."""
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
        twin.spawned = self.spawned.copy()
        twin.host_of = self.host_of.copy()
        twin._moving = deque()
        return twin

    def own(self, process: str) -> Worker:
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
        """Of what a process's future depends on, but for names and ranks."""
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = self.describer.worker(self.workers[name])
        return key

    def books(self) -> sameness.Books:
        """What the controller knows."""
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
                tuple([(name, worker.key()) for name, worker in self.workers.items()]),
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

    # --- what may happen --------------------------------------------------------------------------------------------
    def choices(self) -> list[Action]:
        """Everything that may happen next, in an order that is always the same."""
        for worker in self.workers.values():  # whom to ask is chosen at once, and may be any source
            if worker.alive and worker.copying is not None and not (worker.copying.source or worker.copying.over):
                assert isinstance(worker.restore, Restore)
                return [("ask", worker.name, source.address) for source in worker.restore.sources]
        out: list[Action] = [("up", name) for name, queue in sorted(self.up.items()) if queue]
        out += [("down", name) for name, queue in sorted(self.down.items()) if queue]
        groups = [*self.groups.values(), *(meeting.group for meeting in self.meetings.values())]
        alive = {w.rank: w for w in self.workers.values() if w.alive}
        for group in groups:
            out += self._outcomes(group, alive)
        for generation, meeting in self.meetings.items():
            if meeting.complete and self.fine:
                through = meeting.connected | meeting.absent
                out += [("connect", generation, rank) for rank in sorted(meeting.present - through)]
        for worker in self.workers.values():
            if worker.alive and not worker.frozen:
                if worker.awake and worker.point not in _IDLE_WAITS:
                    out.append(("step", worker.name, worker.ticket))
                if worker.copying is not None and worker.copying.sending and not worker.copying.over:
                    out.append(("arrive", worker.name))
        if not out:
            out += self._when_nothing_else()
        if self.faults_left:
            for worker in self.workers.values():
                if (
                    worker.alive
                    and not worker.frozen
                    and worker.rank >= 0
                    and worker.point not in ("RELEASED", "EXITING")
                ):
                    out += [("fault", worker.name, kind) for kind in self.kinds]
        out += [
            ("suspect", w.name) for w in self.workers.values() if w.alive and w.frozen and w.name not in self.suspected
        ]
        return out

    def _outcomes(self, group: Group, alive: dict[int, Worker]) -> Iterator[Action]:
        for rank, number, operation in group.waiting():
            worker = alive.get(rank)
            if worker is None or worker.group_generation != group.generation or worker.operation != number:
                continue
            if group.can_complete(rank, operation):
                yield ("settle", group.generation, number, rank, True)
            if group.can_break():
                yield ("settle", group.generation, number, rank, False)

    def _when_nothing_else(self) -> list[Action]:
        waiting = [w for w in self.workers.values() if w.alive and w.awake and w.point in _IDLE_WAITS and not w.frozen]
        if waiting:
            return [("step", waiting[0].name, waiting[0].ticket)]
        return [("expire",)] if self.controller.next_deadline() is not None else []

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
        """Let happen what need not be told apart. Raises Violation if that goes on for ever."""
        for _ in range(_MAX_UNSEEN):
            if self.end is not None:
                return
            if self._moving:
                process, ticket = self._moving.popleft()
                self.perform(("step", process, ticket))
                continue
            at_once = next(self._to_the_dead() if self.fine else self._at_once(), None)
            if at_once is None:
                return
            self.perform(at_once)
        raise Violation(f"L2: after {_MAX_UNSEEN} moves that nobody decided on there is still no rest")

    def _at_once(self) -> Iterator[Action]:
        for name, ups in sorted(self.up.items()):
            if ups and not isinstance(ups[0], ev.ProcessExited):
                yield "up", name
        for name, downs in sorted(self.down.items()):
            if downs and not self._matters_when(self.workers.get(name), downs[0]):
                yield "down", name
        for generation, meeting in self.meetings.items():
            if meeting.complete and not meeting.absent:
                for rank in sorted(meeting.present - meeting.connected):
                    yield "connect", generation, rank

    def _to_the_dead(self) -> Iterator[Action]:
        """What is sent to a dead process is lost, whenever it would arrive."""
        for name, downs in sorted(self.down.items()):
            worker = self.workers.get(name)
            if downs and (worker is None or not worker.alive):
                yield "down", name

    def _matters_when(self, worker: Worker | None, message: object) -> bool:
        """Whether it makes a difference to others when this order arrives."""
        if worker is None or not worker.alive:
            return False
        if isinstance(message, Restore):
            return not worker.blank
        return isinstance(message, Stop) and worker.page.phase is not Phase.PARKED

    suspected: frozenset[str] = frozenset()
    listener: Callable[[str, object], None] | None = None

    def note(self, what: str, thing: object) -> None:
        if self.listener is not None:
            self.listener(what, thing)

    def _strike(self, worker: Worker, kind: Fault) -> None:
        self.faults_left -= 1
        self.checker.struck(kind, worker)
        worker.struck = True
        match kind:
            case Fault.FREEZE:
                worker.freeze()
            case Fault.CUT:
                worker.cut()
            case _:
                worker.die(-9)

    # --- what the world asks of a driver ----------------------------------------------------------------------------
    def plan(self, action: Action) -> None:
        """Nothing to do: `choices` looks at what there is."""
        if action[0] == "dead":
            self._dead(action[1], action[2])

    def choose_source(self, target: Process, restore: Restore) -> str:  # noqa: ARG002 (any of them: see `choices`)
        return ""

    def asked(self, target: Process) -> None:
        if target.copying is not None and target.copying.source:
            super().asked(target)

    def _ask(self, process: str, source: str) -> None:
        target = self.own(process)
        assert target.copying is not None
        target.copying.source = source
        self.asked(target)

    def plan_step(self, worker: Process) -> None:
        if worker.point not in _IDLE_WAITS and (not self.fine or worker.point not in _SEEN):
            self._moving.append((worker.name, worker.ticket))

    def plan_patience(self, worker: Process, seconds: float) -> None:
        """Deadlines of the controller are enough; those of workers are the random search's part."""


# --- the search ---------------------------------------------------------------------------------------------------
@dataclass
class Searched:
    """What a search came to."""

    situations: int = 0
    steps: int = 0  # from one situation to the next
    ends: dict[str, int] = field(default_factory=dict)  # how often a job ended in which way
    seconds: float = 0.0
    violation: str = ""
    script: tuple[int, ...] = ()  # that leads to it: which of the choices, each time
    complete: bool = False
    keys: set[int] = field(default_factory=set, repr=False)  # of the situations from which something follows


@dataclass
class _Node:
    situation: Situation
    key: int
    parent: "_Node | None"
    choice: int

    def script(self) -> tuple[int, ...]:
        choices: list[int] = []
        node: _Node | None = self
        while node is not None and node.parent is not None:
            choices.append(node.choice)
            node = node.parent
        return tuple(reversed(choices))


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """One order of events, to be followed again: the situation where it begins, and a choice at each step."""

    ranks: int
    steps: int
    faults: int
    kinds: tuple[str, ...]
    choices: tuple[int, ...]
    fine: bool = False
    mutation: str = ""
    shapes: tuple[str, ...] = ()
    relearns: bool = False

    def follow(self, parts: Parts = PRODUCTION) -> str:
        """What happens, a line each. Raises Violation, with these lines, where an invariant breaks."""
        lines: list[str] = []
        pattern = pattern_of(self.shapes, relearns=self.relearns)
        here = situation(self.ranks, self.steps, self.faults, self.kinds, parts, fine=self.fine, pattern=pattern)
        here.listener = lambda what, thing: lines.append(f"    {what} {show(thing)}")
        for choice in self.choices:
            action = here.choices()[choice]
            lines.append(" ".join(map(str, action)))
            try:
                here.happen(action)
            except Violation as violation:
                raise Violation(f"{violation}\n" + "\n".join(lines)) from None
        return "\n".join(lines)


def explore(start: Situation, *, seconds: float | None = None, exact: bool = False) -> Searched:
    """Follow everything from `start`. Stops at the first violation.

    Args:
        start: is not changed.
        seconds: give up after so long.
        exact: follow situations that differ only in names, too. For tests: it finds nothing else, in a longer time.
    """
    found = Searched()
    begun = time.monotonic()
    key = Situation.exact_key if exact else Situation.key
    root = _Node(start, key(start), None, -1)
    seen = {root.key}
    onward: dict[int, int] = {}  # where the first choice leads: following it, every job must end
    stack = [root]
    while stack:
        node = stack.pop()
        found.situations += 1
        if node.situation.end is not None:
            kind = _kind_of_end(node.situation.end.error)
            found.ends[kind] = found.ends.get(kind, 0) + 1
            continue
        try:
            new = list(_follow(node, found, onward, key))
        except _Broken as broken:
            found.violation, found.script = str(broken.violation), (*node.script(), *broken.choice)
            break
        for child in reversed(new):
            if child.key not in seen:
                seen.add(child.key)
                stack.append(child)
        if seconds is not None and found.situations % 1000 == 0 and time.monotonic() - begun > seconds:
            break
    else:
        found.complete = True
        found.keys = set(onward)
        if _has_circle(onward):
            found.violation = "L2: some job goes round in circles and never ends"
    found.seconds = time.monotonic() - begun
    return found


class _Broken(Exception):
    """An invariant breaks, after one more choice or none."""

    def __init__(self, violation: Violation, choice: tuple[int, ...]) -> None:
        super().__init__(violation)
        self.violation = violation
        self.choice = choice


def _follow(
    node: _Node, found: Searched, onward: dict[int, int], key_of: Callable[[Situation], int]
) -> Iterator[_Node]:
    choices = node.situation.choices()
    if not choices:
        stage = node.situation.controller.stage
        raise _Broken(Violation(f"L2: nothing will ever happen again, in stage {stage}"), ())
    for number, choice in enumerate(choices):
        found.steps += 1
        child = node.situation.copy()
        try:
            child.happen(choice)
        except Violation as violation:
            raise _Broken(violation, (number,)) from None
        key = key_of(child)
        if number == 0:
            onward[node.key] = key
        yield _Node(child, key, node, number)


def _has_circle(onward: dict[int, int]) -> bool:
    """Whether following first choices from somewhere comes back to where it has been."""
    good: set[int] = set()
    for start in onward:
        path: list[int] = []
        here: int | None = start
        on_path: set[int] = set()
        while here is not None and here not in good:
            if here in on_path:
                return True
            path.append(here)
            on_path.add(here)
            here = onward.get(here)
        good.update(path)
    return False


def _kind_of_end(error: str) -> str:
    if not error:
        return "finished"
    return "every replica lost" if "replica" in error else error


def situation(
    ranks: int,
    steps: int,
    faults: int,
    kinds: Sequence[str],
    parts: Parts = PRODUCTION,
    *,
    fine: bool = False,
    pattern: Pattern = ONE_WRITE,
) -> Situation:
    """Where the search begins."""
    start = Situation(ranks, steps, faults, [FAULTS[kind] for kind in kinds], parts, fine=fine, pattern=pattern)
    start.begin()
    return start


def main(job: Script) -> int:
    """For the command line: search the job of `job`, whose choices do not count. Returns the exit status."""
    mutation = find_mutation(job.mutation) if job.mutation else None
    pattern = pattern_of(job.shapes, relearns=job.relearns)
    with mutation.planted() if mutation is not None else contextlib.nullcontext(PRODUCTION) as parts:
        start = situation(job.ranks, job.steps, job.faults, job.kinds, parts, fine=job.fine, pattern=pattern)
        found = explore(start)
    shapes = f" of {', '.join(job.shapes)}" if job.shapes else ""
    print(
        f"{job.ranks} ranks, {job.steps} steps{shapes}, up to {job.faults} faults ({', '.join(job.kinds)}): "
        f"{found.situations:,} situations, {found.steps:,} steps between them, in {found.seconds:.1f} s; {found.ends}"
    )
    if found.violation:
        script = msgspec.structs.replace(job, choices=found.script)
        print(found.violation)
        print(f"replay it with: python -m relight.sim --replay '{msgspec.json.encode(script).decode()}'")
    return 1 if found.violation else 0
