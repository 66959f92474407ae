"""Everything that may happen next in a situation of the exhaustive search, and what happens at once."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relight.core.protocol import events as ev
from relight.core.protocol.commands import Restore, Stop
from relight.core.protocol.position import Phase
from relight.sim.model.network import Group
from relight.sim.model.worker.worker import SimulatedWorker
from relight.sim.world.world import Action

if TYPE_CHECKING:
    from relight.sim.search.situation import Situation

IDLE_WAITS = frozenset({"LOADING"})  # points that are left only when nothing else can happen


def choices(here: "Situation") -> list[Action]:
    """Everything that may happen next, in an order that is always the same."""
    if questions := _questions(here):
        return questions
    out: list[Action] = [("up", name) for name, queue in sorted(here.up.items()) if queue]
    out += [("down", name) for name, queue in sorted(here.down.items()) if queue]
    groups = [*here.groups.values(), *(meeting.group for meeting in here.meetings.values())]
    alive = {w.rank: w for w in here.workers.values() if w.alive}
    for group in groups:
        out += _outcomes(group, alive)
    out += _connections(here) if here.fine else ()
    for worker in here.workers.values():
        out += _moves(worker)
    if not out:
        out += _when_nothing_else(here)
    out += _faults(here) if here.faults_left else ()
    out += [("suspect", w.name) for w in here.workers.values() if w.alive and w.frozen and w.name not in here.suspected]
    return out


def _questions(here: "Situation") -> list[Action]:
    """The sources that a worker may ask for its state: it chooses one at once, before anything else happens."""
    for worker in here.workers.values():
        if worker.alive and worker.copying is not None and not (worker.copying.source or worker.copying.over):
            assert isinstance(worker.machine.order, Restore)
            return [("ask", worker.name, source.address) for source in worker.machine.order.sources]
    return []


def _connections(here: "Situation") -> Iterator[Action]:
    for generation, meeting in here.meetings.items():
        if meeting.complete:
            for rank in sorted(meeting.present - meeting.connected - meeting.absent):
                yield "connect", generation, rank


def _moves(worker: SimulatedWorker) -> Iterator[Action]:
    if worker.alive and not worker.frozen:
        if worker.awake and worker.point not in IDLE_WAITS:
            yield "step", worker.name, worker.ticket
        if worker.copying is not None and worker.copying.sending and not worker.copying.over:
            yield "arrive", worker.name


def _faults(here: "Situation") -> Iterator[Action]:
    for worker in here.workers.values():
        if worker.alive and not worker.frozen and worker.rank >= 0 and worker.point not in ("RELEASED", "EXITING"):
            for kind in here.kinds:
                yield "fault", worker.name, kind


def _outcomes(group: Group, alive: dict[int, SimulatedWorker]) -> Iterator[Action]:
    for rank, number, operation in group.waiting():
        worker = alive.get(rank)
        if worker is None or worker.group_generation != group.generation or worker.operation != number:
            continue
        if group.can_complete(rank, operation):
            yield ("settle", group.generation, number, rank, True)
        if group.can_break():
            yield ("settle", group.generation, number, rank, False)


def _when_nothing_else(here: "Situation") -> list[Action]:
    waiting = [w for w in here.workers.values() if w.alive and w.awake and w.point in IDLE_WAITS and not w.frozen]
    if waiting:
        return [("step", waiting[0].name, waiting[0].ticket)]
    return [("expire",)] if here.controller.next_deadline() is not None else []


def at_once(here: "Situation") -> Iterator[Action]:
    """Arrivals that make no difference to others whenever they happen."""
    for name, ups in sorted(here.up.items()):
        if ups and not isinstance(ups[0], ev.ProcessExited):
            yield "up", name
    for name, downs in sorted(here.down.items()):
        if downs and not _matters_when(here.workers.get(name), downs[0]):
            yield "down", name
    for generation, meeting in here.meetings.items():
        if meeting.complete and not meeting.absent:
            for rank in sorted(meeting.present - meeting.connected):
                yield "connect", generation, rank


def to_the_dead(here: "Situation") -> Iterator[Action]:
    """Messages to dead processes: they are lost, whenever they would arrive."""
    for name, downs in sorted(here.down.items()):
        worker = here.workers.get(name)
        if downs and (worker is None or not worker.alive):
            yield "down", name


def _matters_when(worker: SimulatedWorker | None, message: object) -> bool:
    """Return whether it makes a difference to others when this order arrives."""
    if worker is None or not worker.alive:
        return False
    if isinstance(message, Restore):
        return not worker.machine.blank
    return isinstance(message, Stop) and worker.page.phase is not Phase.PARKED
