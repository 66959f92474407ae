"""Equality of two situations of the exhaustive search: what follows from one follows from the other.

`key` describes a situation by roles instead of names: what is true of each rank, of each process in reserve, and of all
of them together. Two situations with equal keys differ by a *renaming* of processes and by a permutation of the ranks
from 1 on, and by facts that nothing reads any more. That loses nothing, because no rule asks for a name or compares
two ranks:

- Rank 0 is told apart: it alone publishes.
- What ranks compute differs by rank. It is described as "what an undisturbed run has at this place", or by its value if
  it is something else, so two ranks are alike if both are right.
- Reports are taken in as they come, and every rule looks at all of them together; audiences, sources and targets are
  sets. Where the code goes through ranks in their order (`Members.by_rank`), order shows in sentences for people only.
- A vacant rank gets the oldest warm standby, the next vacant rank the next one. Warm standbys are alike but for their
  age, and the reserve is described in the order of age.
- Which source a target asks depends on its number (`choose_sources`), so the search lets it ask any of them.
- Dead processes count as long as their rank's private state may be asked of them (`Members.predecessors`).

That this is so is tested, not only argued: tests/sim/test_exhaustive.py follows every order of small jobs by
`exact_key`, and finds that situations with equal keys have successors with equal keys (a bisimulation).
"""

from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from relight.core.controller import Controller, Stage
from relight.core.membership.members import Process
from relight.core.protocol.commands import Assign, Begin, Release, Restore, Resume
from relight.core.protocol.position import Position
from relight.sim.model.contents import reference
from relight.sim.model.network import Copying, Group
from relight.sim.model.page import Page
from relight.sim.model.shapes import ONE_WRITE, Pattern
from relight.sim.model.worker.worker import SimulatedWorker
from relight.wire.messages import CopyPrivate

if TYPE_CHECKING:
    from relight.sim.search.situation import Situation

# Points at which the reduced gradient in hand is still needed; elsewhere only if the rank is prepared.
_HOLDS_GRADIENT = frozenset({"COMPARE", "PREPARE", "READY", "BARRIER", "AGREE", "FINISH", "OPTIMIZER", "AFTER_WRITE"})
# Of a message: who says it (the queue tells), and what only people and reports read.
_UNREAD_FIELDS = frozenset(
    "process rank restore_address restore_endpoint evidence summary traceback why noticed_ns step pid slot agent "
    "stop_seconds progress attempt sources targets derived".split()
)


@lru_cache(maxsize=64)
def _known(
    world_size: int, until: int, pattern: Pattern
) -> tuple[tuple[dict[int, int], dict[int, tuple[int, int]]], ...]:
    """The version of each right private state, and step and number of each right contribution, by rank."""
    _, privates, brought, _ = reference(world_size, until, pattern)
    return tuple(
        (
            {privates[version][rank]: version for version in range(until + 1)},
            {
                by_rank[rank]: (step, number)
                for step, collectives in enumerate(brought)
                for number, by_rank in enumerate(collectives)
            },
        )
        for rank in range(world_size)
    )


class Describer:
    """Describes the situations of one search. It knows the values of an undisturbed run."""

    def __init__(self, world_size: int, until: int, pattern: Pattern = ONE_WRITE) -> None:
        self._known = _known(world_size, until, pattern)

    # --- one process ----------------------------------------------------------------------------------------------
    def worker(self, worker: SimulatedWorker) -> int:
        """A key of all that the future of this process depends on, but for its name, its rank and its source."""
        if not worker.alive:
            return hash((False, self._page_of_the_dead(worker)))
        machine, copying, page = worker.machine, worker.copying, worker.page
        prepared = machine.prepared == machine.version
        orders: tuple[Hashable, ...] = ()
        if machine.closed:  # what is older than the newest Stop is not obeyed any more
            pending = (machine.orders.get(Restore), machine.orders.get(Resume))
            orders = tuple([self._order(o, worker) for o in pending if o and o.generation >= machine.newest])
        return hash(
            (
                worker.point,
                tuple([type(action) for action in worker.todo]),
                worker.state,
                self._private(worker.private, worker.rank),
                worker.frozen,
                worker.hung,
                worker.gradient if prepared or worker.point in _HOLDS_GRADIENT else 0,
                worker.undo,
                worker.surprised,
                worker.has_new,
                worker.agreed,
                worker.group_generation,
                worker.operation,
                worker.staged,
                worker.shared,
                worker.meeting_generation,
                worker.offer,
                worker.awake,
                None if copying is None else self._copying(copying),
                tuple([self._order(order, worker) for order in worker.unread]),
                (page.phase, page.version, page.torn),
                self._kept(page, worker.rank),
                machine.state,
                machine.version,
                machine.blank,
                machine.torn,
                machine.alone,
                (machine.at_collective, machine.gives, machine.go_alone, machine.runs_code, machine.comes),
                machine.is_standby,
                machine.generation,
                machine.reported,
                machine.started,
                machine.prepared,
                machine.passed,
                machine.began if worker.world.pattern.relearns else 0,
                (worker.planned, worker.learner, worker.knows) if worker.world.pattern.learns else (),
                machine.surprise,
                tuple([doubt.reason for doubt in worker.doubts]) if worker.doubts else (),
                self._order(machine.order, worker),
                machine.first_after_recovery,
                machine.newest,
                machine.closed,
                orders,
                Begin in machine.orders,
                Assign in machine.orders,
                Release in machine.orders,
            )
        )

    def _copying(self, copying: Copying) -> Hashable:
        asked, failed = bool(copying.source), bool(copying.failed)
        return asked, copying.generation, copying.version, copying.sending, copying.state, copying.results, failed

    def _page_of_the_dead(self, worker: SimulatedWorker) -> Hashable:
        return worker.page.phase, worker.page.version, self._kept(worker.page, worker.rank)

    def _kept(self, page: Page, rank: int) -> Hashable:
        """The private states beside a page."""
        kept = [None if slot is None else (slot[0], self._private(slot[1], rank)) for slot in page.slots]
        return (*page.words, *kept)

    def _private(self, private: int, rank: int) -> Hashable:
        version = self._known[rank][0].get(private) if rank >= 0 else None
        return ("wrong", private) if version is None else version

    def _order(self, order: Any, worker: SimulatedWorker) -> Hashable:
        if order is None:
            return None
        if isinstance(order, Restore):
            serves = worker.rank in [source.rank for source in order.sources]
            copies = bool(order.targets), worker.rank in order.targets, _given(order, worker.rank)
            return "Restore", order.generation, order.target, *copies, serves, order.runs_code, order.meets_at
        return type(order).__name__, getattr(order, "generation", 0)

    # --- the network ----------------------------------------------------------------------------------------------
    def group(self, group: Group, rank: int) -> Hashable:
        """A rank's part in a process group."""
        operations = []
        for number, operation in group.operations.items():
            if len(operation.outcome) < group.size:
                value = operation.entered.get(rank)
                place = None if value is None else self._known[rank][1].get(value)
                brought = value if place is None else ("right", place)
                operations.append((number, operation.what, operation.lacking, brought, operation.outcome.get(rank)))
        gone, lost = group.gone >> rank & 1, group.lost >> rank & 1
        return group.generation, gone, lost, group.count[rank], tuple(operations)


# --- what is said -------------------------------------------------------------------------------------------------
def _said(message: Any) -> Hashable:
    fields = message.__struct_fields__
    return type(message).__name__, *(
        value.private_versions if isinstance(value := getattr(message, name), Position) else value
        for name in fields
        if name not in _UNREAD_FIELDS
    )


def _told(message: Any, rank: int, predecessors: tuple[str, ...]) -> Hashable:
    """An order or a request on its way to a process of this rank."""
    if isinstance(message, CopyPrivate):
        known = message.source in predecessors
        return "CopyPrivate", predecessors.index(message.source) if known else message.source, message.version
    if isinstance(message, Restore):
        serves = rank in [source.rank for source in message.sources]
        copies = rank in message.targets, _given(message, rank)
        return "Restore", message.generation, message.target, *copies, serves, message.runs_code, message.meets_at
    if isinstance(message, Assign):
        return "Assign", message.generation
    return _said(message)


def _given(order: Restore, rank: int) -> Hashable:
    return bool(order.given), rank in order.given


# --- the controller -----------------------------------------------------------------------------------------------
class Books:
    """A controller's knowledge, sorted by process. Made anew when the controller has changed."""

    def __init__(self, controller: Controller, now: float) -> None:
        members = controller.members
        recovers = controller.stage in (Stage.STOPPING, Stage.RESTORING)
        job, attempt = controller.job, controller.job.attempt
        to_resume, next_at = controller.restoring.to_resume, controller.attempts.next_at
        reports = [attempt.done]
        if recovers:  # what was said in one is forgotten when the next one begins
            reports += [attempt.stopped, attempt.restored]  # type: ignore[list-item]
        self.of: dict[str, int] = {}  # each process that counts
        self.holders = members._holders
        self.predecessors = members.predecessors
        self.reserve = tuple(members._reserve)
        decision = attempt.decision if recovers else None
        self.targets = () if decision is None else decision.targets
        self.others: list[Process] = []  # declared failed, not known to have ended, no rank's predecessor
        counted = {name for names in members.predecessors.values() for name in names}
        self.awaited: dict[str, None] = {}
        for process in members.processes.values():
            name = process.name
            if not process.alive and name not in counted:
                continue
            said = tuple([_said(kept[name]) if name in kept else None for kept in reports])
            ends = process.final_position.private_versions
            times = (process.spawned_at - now, process.asked_at - now, process.ready_at - now)
            life = (process.alive, process.failed, process.gone, process.doomed)
            state = (*life, process.ready, process.replacement, process.proven)
            resumes, released = name in to_resume, name in controller.finishing.released
            self.of[name] = hash((state, process.may_hold_state, ends, times, said, resumes, released))
            if process.alive and process.failed and name not in counted:
                self.others.append(process)
        suspected = attempt.suspected_collective
        self.all = hash(
            (
                controller.stage,
                controller.generation,
                None if job.deadline is None else job.deadline - now,
                None if suspected is None else suspected.step,
                attempt.suspected_restore is None,
                job.went_apart,
                job.go_alone,
                None if decision is None else decision.target,
                controller.reserve.patience_seconds,
                attempt.stop_limit_seconds if recovers else None,
                controller.attempts.backoff.relative_to(now),
                None if next_at is None else next_at - now,
                len(controller.job_stats.failures.newest),
                bool(controller.job_stats.doubts.found),
                tuple([sum(name not in self.of for name in kept) for kept in (*reports, to_resume)]),
            )
        )


# --- a situation --------------------------------------------------------------------------------------------------
def key(here: "Situation") -> int:
    """Equal for situations from which the same can follow, up to names."""
    if here.end is not None:
        return hash(here.end.error)
    books, restores = here.books(), _outstanding(here)
    place = {name: rank for rank, name in books.holders.items()}
    return hash(
        (
            _with_copies(_ranks(here, restores), _copies(here, place)),
            tuple([_process(here, name, -1, ()) for name in books.reserve]),
            _as_set([_process(here, p.name, -1, ()) for p in books.others if p.rank is None]),
            tuple([(r.generation, r.target) for r in restores]),
            books.all,
            here.controller.generation,
            here.store_generation,
            here.faults_left,
            here.checker.key_of_all(),
        )
    )


def _process(here: "Situation", name: str, rank: int, predecessors: tuple[str, ...]) -> Hashable:
    """One process: the controller's knowledge of it, its own state, and messages from and to it."""
    worker = here.workers.get(name)
    return (
        here.books().of.get(name),
        None if worker is None else here.worker_key(name),
        name in here.suspected,
        worker is not None and worker.alive and worker.struck,
        tuple([_said(message) for message in here.up.get(name, ())]),
        tuple([_told(message, rank, predecessors) for message in here.down.get(name, ())]),
    )


def _ranks(here: "Situation", restores: list[Restore]) -> list[tuple[Hashable, ...]]:
    """Each rank: its processes, its part in groups, and in restores that are not over."""
    books, workers = here.books(), here.workers
    attached = {w.group_generation for w in workers.values() if w.alive}
    newest = max(here.meetings, default=0)
    groups = [g for number, g in here.groups.items() if number in attached]
    meetings = [m for number, m in here.meetings.items() if number in attached or number == newest]
    late, group_key = here.checker.struck_late(), here.describer.group
    ranks: list[tuple[Hashable, ...]] = []
    for rank in range(here.world_size):
        holder, predecessors = books.holders.get(rank), books.predecessors.get(rank, ())
        others = [p.name for p in books.others if p.rank == rank]
        met = [(rank in m.present, rank in m.absent, rank in m.connected, group_key(m.group, rank)) for m in meetings]
        serves = [(rank in r.targets, any(source.address == holder for source in r.sources)) for r in restores]
        ranks.append(
            (
                None if holder is None else _process(here, holder, rank, predecessors),
                tuple([_process(here, name, rank, ()) for name in predecessors]),
                _as_set([_process(here, name, rank, ()) for name in others]),
                tuple([group_key(group, rank) for group in groups]),
                tuple(met),
                tuple(serves),
                rank in books.targets,
                rank in late,
            )
        )
    return ranks


def _as_set(things: list[Hashable]) -> Hashable:
    return tuple(sorted([hash(thing) for thing in things])) if things else ()


def _outstanding(here: "Situation") -> list[Restore]:
    """Restore orders that some rank has yet to obey, and to copy for."""
    found: dict[int, Restore] = {}
    for name, worker in here.workers.items():
        if not worker.alive or not worker.machine.blank:
            continue
        machine = worker.machine
        for order in (machine.orders.get(Restore), machine.order, *worker.unread, *here.down.get(name, ())):
            if isinstance(order, Restore) and order.generation >= machine.newest:
                found[order.generation] = order
    return [found[generation] for generation in sorted(found)]


def _copies(here: "Situation", place: dict[str, int]) -> dict[int, Hashable]:
    """Return the rank that each copying rank copies from, or the process if that holds no rank."""
    copies: dict[int, Hashable] = {}
    for worker in here.workers.values():
        copying = worker.copying
        if worker.alive and copying is not None and copying.source and not copying.over:
            copies[worker.rank] = place.get(copying.source, copying.source)
    return copies


def _with_copies(ranks: list[tuple[Hashable, ...]], copies: dict[int, Hashable]) -> Hashable:
    """Rank 0, and the others in no order. Ranks that copy are distinguished by their sources.

    A source does not copy itself, so to know of each rank what copies from it is to know all.
    """
    if not copies:
        return hash(ranks[0]), _as_set(list(ranks[1:]))
    if any(source in copies or not isinstance(source, int) for source in copies.values()):
        return tuple(ranks), tuple(sorted(copies.items()))  # never, in production: then told apart by number
    told = [
        (
            one,
            _as_set([(ranks[target], target == 0) for target, source in copies.items() if source == rank]),
            rank in copies,
        )
        for rank, one in enumerate(ranks)
    ]
    return hash(told[0]), _as_set(list(told[1:]))
