"""Equality of two workers of the exhaustive search, names included: what a check of `sameness.py` needs."""

from collections.abc import Hashable

from relight.core.worker.worker import Worker
from relight.sim.model.worker.worker import SimulatedWorker


def exact_key(worker: SimulatedWorker) -> Hashable:
    """A key of all that the future of this process depends on; of a dead one, only its page."""
    if not worker.alive:
        return worker.name, worker.rank, worker.page.key()
    copying = worker.copying
    return (
        worker.name,
        worker.point,
        worker.state,
        worker.private,
        worker.frozen,
        worker.hung,
        worker.struck,
        worker.gradient,
        worker.undo,
        worker.surprised,
        worker.has_new,
        worker.agreed,
        worker.planned,
        worker.learner,
        worker.knows,
        worker.doubts,
        worker.group_generation,
        worker.operation,
        worker.staged,
        worker.shared,
        worker.meeting_generation,
        worker.offer,
        worker.todo,
        worker.awake,
        None if copying is None else copying.key(),
        tuple(worker.unread),
        worker.page.key(),
        _decisions_key(worker.machine, began=worker.world.pattern.relearns),
    )


def _decisions_key(machine: Worker, *, began: bool) -> Hashable:
    """A key of all that later decisions depend on. `began`: also on the version with which it began to train."""
    return (
        machine.state,
        machine.rank,
        machine.version,
        machine.blank,
        machine.torn,
        machine.alone,
        machine.at_collective,
        machine.gives,
        machine.go_alone,
        machine.runs_code,
        machine.comes,
        machine.is_standby,
        machine.generation,
        machine.reported,
        machine.started,
        machine.prepared,
        machine.passed,
        machine.surprise,
        machine.was_there,
        machine.began if began else 0,
        machine.order,
        machine.first_after_recovery,
        machine.newest,
        machine.closed,
        _pending(machine),
    )


def _pending(machine: Worker) -> tuple[Hashable, ...]:
    """Orders that may still be carried out: what is older than the newest Stop is not."""
    return tuple([order for order in machine.orders.values() if order.generation >= machine.newest])
