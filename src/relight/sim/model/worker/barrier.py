"""A simulated worker comes to the barrier of a step: states are compared, it prepares, and agrees on new buffers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from relight.core.protocol import events as ev
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State as Stand
from relight.sim.model.contents import Violation, private_with_buffer
from relight.sim.model.shapes import seen_pattern

if TYPE_CHECKING:
    from relight.sim.model.worker.worker import SimulatedWorker as Worker


# In what a rank brings to a barrier:
_NEW = 1 << 39  # it is not prepared: ranks are to agree on a buffer first
_PAUSE = 1 << 40  # all are to pause after this step
_KNOWS = 1 << 41  # it had heard of a surprise; read by the judge alone
_PATTERN = 1 << 42  # the number of its pattern


# --- collectives --------------------------------------------------------------------------------------------------
def enter(worker: "Worker", kind: str, mine: int) -> bool:
    """Begin a collective. False if the generation is closed, so that it breaks at once."""
    if worker.machine.closed:
        return False
    group = worker.world.group(worker.group_generation)
    worker.page.collectives += 1
    number = worker.shared if kind == "SHARE" else 0
    worker.operation = group.enter(worker.rank, (kind, number, worker.state.version, worker.state.lineage), mine)
    worker.world.entered(group, worker.operation)
    worker.go_to(kind)
    return True


def outcome(worker: "Worker") -> dict[int, int] | None:
    """Everyone's contributions, or None if the collective broke."""
    operation = worker.world.group(worker.group_generation).operations.get(worker.operation)
    if operation is None or not operation.outcome[worker.rank]:
        return None
    return operation.entered


# --- the barrier --------------------------------------------------------------------------------------------------
def approach_barrier(worker: "Worker") -> None:
    """Compare the states if that is due, and prepare."""
    every = worker.world.verify_every
    if not worker.machine.compares(every, first=bool(every)):
        _prepare(worker)
        return
    worker.stamp(Phase.BARRIER)
    if not enter(worker, "COMPARE", worker.state.content):
        worker.interrupt()


def _on_compared(worker: "Worker") -> None:
    contents = outcome(worker)
    if contents is None:
        worker.await_stop()
    elif _differ(worker, [contents[rank] for rank in sorted(contents)]):
        worker.feed(happened.StatesDiffer())
    else:
        worker.feed(happened.StatesAgree())
        _prepare(worker)


def _differ(worker: "Worker", contents: Sequence[int]) -> bool:
    parts = worker.world.parts
    return any(content != contents[rank % parts] for rank, content in enumerate(contents))


def _report_difference(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    contents = outcome(worker) or {}
    worker.world.send(
        worker,
        ev.StateDiffers(
            process=worker.name,
            rank=worker.rank,
            generation=worker.machine.generation,
            step=worker.state.version,
            digests=tuple(contents[rank] for rank in sorted(contents)),
            noticed_ns=1,
        ),
    )
    worker.go_to("DIFFERS")


def _prepare(worker: "Worker") -> None:
    """Be prepared, unless ranks are to agree on a buffer first: then say so in the barrier's all-reduce."""
    if worker.has_new:
        _bring_vote(worker)
    else:
        worker.feed(happened.GradientsReady())


def _keep_private(worker: "Worker", action: act.Action) -> happened.PrivateKept:  # noqa: ARG001
    worker.page.keep_private(worker.state.version + 1, worker.next_private)
    return happened.PrivateKept()


def _show_prepared(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.page.prepared = worker.state.version


def _withdraw_prepared(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.page.prepared = -1
    worker.page.withdraw_private(worker.state.version + 1)


def _enter_barrier(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    _bring_vote(worker)


def _bring_vote(worker: "Worker") -> None:
    worker.stamp(Phase.BARRIER)
    vote = _NEW * worker.has_new
    vote += (1 if worker.lower is None else worker.lower.vote()) + _PAUSE * worker.machine.winding_down
    if worker.world.pattern.learns:
        vote += _KNOWS * worker.knows + _PATTERN * worker.learner.number(seen_pattern(worker.shape, worker.learner))
    if not enter(worker, "BARRIER", vote):
        worker.interrupt()


def _on_barrier(worker: "Worker") -> None:
    votes = outcome(worker)
    if votes is None:
        worker.await_stop()
        return
    if any(vote & _NEW for vote in votes.values()):
        if worker.machine.state is Stand.AT_BARRIER:
            worker.feed(happened.BarrierPutOff())
        if not enter(worker, "AGREE", 1):
            worker.interrupt()
        return
    if worker.lower is not None:
        worker.lower.count(sum(vote % _PAUSE for vote in votes.values()))
    if worker.world.pattern.learns:
        _learn(worker, votes)
    worker.feed(happened.BarrierPassed(winds_down=any(vote & _PAUSE for vote in votes.values())))


def _on_agreed(worker: "Worker") -> None:
    if outcome(worker) is None:
        worker.await_stop()
    else:
        take_on_buffer(worker)
        worker.feed(happened.GradientsReady())


def take_on_buffer(worker: "Worker") -> None:
    """All ranks know of the buffer that one has changed: from here on, it is each rank's own."""
    worker.has_new, worker.agreed = False, True
    before, worker.next_private = worker.next_private, private_with_buffer(worker.next_private)
    worker.world.checker.wrong.follows(worker.next_private, before)


def _learn(worker: "Worker", votes: dict[int, int]) -> None:
    """Count the patterns of all ranks (`Transaction.count`)."""
    seen, heard = seen_pattern(worker.shape, worker.learner), any(vote & _KNOWS for vote in votes.values())
    if heard and not worker.shape.is_at_end:
        raise Violation(f"I21: rank {worker.rank} has its barrier before a write, though some rank knew of a surprise")
    worker.learner = worker.learner.count(seen, sum(vote // _PATTERN for vote in votes.values()), len(votes))
    worker.knows |= heard or worker.learner.differs


POINTS: dict[str, Callable[["Worker"], None]] = {
    "COMPARE": _on_compared,
    "BARRIER": _on_barrier,
    "AGREE": _on_agreed,
}
CARRY_OUTS: dict[type[act.Action], Callable[..., happened.Event | None]] = {
    act.ReportDifference: _report_difference,
    act.KeepPrivate: _keep_private,
    act.ShowPrepared: _show_prepared,
    act.WithdrawPrepared: _withdraw_prepared,
    act.EnterBarrier: _enter_barrier,
}
