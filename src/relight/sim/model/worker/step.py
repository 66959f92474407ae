"""A simulated worker while nothing fails: how it starts, begins a step and ends. writes.py has the rest of a step."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from relight.core.protocol import events as ev
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State as Stand
from relight.sim.model.contents import (
    State,
    contribution,
    digest_of,
    first_private,
    next_private,
    part_key,
)
from relight.sim.model.shapes import learnt_shape
from relight.sim.model.worker import barrier, writes

if TYPE_CHECKING:
    from relight.sim.model.worker.worker import SimulatedWorker as Worker


# --- start --------------------------------------------------------------------------------------------------------
def _on_start(worker: "Worker") -> None:
    worker.feed(happened.Ordered())
    worker.group_generation = worker.machine.generation
    worker.go_to("LOADING")


def _on_loaded(worker: "Worker") -> None:
    if worker.machine.is_standby:
        worker.go_to("WARMUP")
        return
    worker.private = first_private(worker.rank)
    worker.page.keep_private(0, worker.private)
    worker.feed(happened.ScriptEntered())


def _on_begin(worker: "Worker") -> None:
    worker.feed(happened.Ordered())
    worker.want_step()


def _on_warm(worker: "Worker") -> None:
    worker.stamp(Phase.STANDBY)
    worker.feed(happened.StandbyWarm())


def _on_promoted(worker: "Worker") -> None:
    worker.feed(happened.Ordered())
    worker.go_to("PROMOTED")


def _on_first_recovery(worker: "Worker") -> None:
    worker.stamp(Phase.PARKED)
    worker.feed(happened.StepWanted())


def _take_rank(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.page.rank, worker.page.generation = worker.rank, worker.machine.generation


def _report_entered(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.report(
        ev.TrainingEntered(
            process=worker.name,
            rank=worker.rank,
            version=0,
            layout_digest="layout",
            state_digest=digest(worker),
            until=worker.world.until,
            shard=part_key(worker.rank, worker.world.parts),
            buddy_every=worker.lower.buddy_every if worker.lower is not None else 0,
            checkpoint_every=worker.lower.checkpoint_every if worker.lower is not None else 0,
        )
    )


def _report_ready(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.report(ev.StandbyReady(process=worker.name, layout_digest="layout"))


def _assign_buddies(worker: "Worker", action: act.AssignBuddies) -> None:
    if worker.lower is not None:
        worker.lower.assign(action.buddies, action.keep)


def digest(worker: "Worker", state: State | None = None) -> str:
    """The digest of a worker's part of its state, or of another one."""
    return digest_of(state or worker.state, worker.rank, worker.world.parts)


# --- the loop -----------------------------------------------------------------------------------------------------
def _offer_step(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.page.step = worker.page.version = worker.state.version
    worker.stamp(Phase.OUTSIDE)
    if worker.lower is not None:
        worker.lower.between_steps()
    writes.publish(worker)
    if worker.page.asked_to_leave:
        worker.die(0)
    else:
        worker.go_to("OUTSIDE")


def _begin_step(worker: "Worker") -> None:
    worker.feed(happened.StepEntered())
    worker.page.prepared = -1
    worker.page.step = worker.state.version
    pattern = worker.world.pattern
    worker.machine.comes = pattern.script(worker.state.version).waits
    worker.has_new, worker.agreed = pattern.script(worker.state.version).finds(worker.rank), False
    worker.planned = learnt_shape(pattern.script(worker.state.version), worker.learner) if pattern.learns else None
    worker.undo = worker.state if worker.shape.written_before else None
    worker.stamp(Phase.FORWARD)
    worker.world.checker.began_step(worker)
    worker.go_to("FORWARD")


def _run_forward(worker: "Worker") -> None:
    if worker.machine.closed:
        worker.interrupt()
        return
    worker.stamp(Phase.BACKWARD)
    mine = contribution(worker.state, worker.private, worker.rank)
    worker.world.checker.wrong.follows(mine, worker.state.content, worker.private)
    if not barrier.enter(worker, "GRADIENT", mine):
        worker.interrupt()


def _on_gradient(worker: "Worker") -> None:
    if not writes.take_gradient(worker):
        return
    worker.next_private = next_private(worker.private, worker.state.version)
    worker.world.checker.wrong.follows(worker.next_private, worker.private)
    worker.page.forget_private(worker.state.version + 1)
    if worker.shape.written_before:
        writes.write_undoably(worker)
    else:
        barrier.approach_barrier(worker)


# --- scripts that leave their loops (training/worker/membership.py) ----------------------------------------------
def _after_step(worker: "Worker") -> None:
    """The code after the block may leave the loop. A replacement does not run it, but for what others wait in."""
    if worker.world.leaves and worker.state.version == worker.world.leaves:
        worker.machine.left = worker.state.version
    share(worker)


def share(worker: "Worker") -> None:
    """Code between two steps comes to its next collective, if there is one, or to one again."""
    if worker.shared == worker.world.pattern.script(worker.state.version - 1).shares_after:
        results, worker.shared = worker.shared, 0
        if worker.world.pattern.script(worker.state.version - 1).waits:
            worker.machine.handle(happened.CodeRan(results))
        worker.want_step()
    elif not barrier.enter(worker, "SHARE", 1):
        _cut(worker)


def _on_shared(worker: "Worker") -> None:
    """All is as it should be, or a peer was lost: then wait for the Stop that explains it."""
    if barrier.outcome(worker) is not None:
        worker.shared += 1
        share(worker)
    elif actions := worker.machine.handle(happened.CollectiveBroke()):
        worker.go_to("UNSHARED")
        for action in actions:
            worker.carry_outs[type(action)](worker, action)
    else:
        _cut(worker)


def _cut(worker: "Worker") -> None:
    """`RelightProcessGroup._cut`: a recovery cuts the collective."""
    if worker.world.pattern.script(worker.state.version - 1).waits:
        worker.stamp(Phase.PARKED)
        worker.feed(happened.WaitsBetweenSteps(worker.shared + 1))
    else:
        _go_on_alone(worker)


def _go_on_alone(worker: "Worker", action: act.Action | None = None) -> None:  # noqa: ARG001
    """The collective gives this rank its own value."""
    worker.shared = 0
    worker.state = worker.state.alone(worker.rank)
    worker.world.checker.wrong.goes_alone(worker.state.content)
    worker.machine.handle(happened.WentOnAlone())
    writes.doubt(worker, act.Doubt("a collective between two steps was cut short"))
    worker.want_step()


def want(worker: "Worker") -> None:
    """Want a step. Before the first one after a recovery, ask whether others have left their loops."""
    machine, world = worker.machine, worker.world
    may_be_left = world.leaves > 0 and machine.may_be_left and not machine.closed and world.world_size > 1
    if may_be_left and worker.asked_in != machine.generation:
        worker.asked_in = machine.generation
        barrier.enter(worker, "ASK", int(machine.left is not None))
    else:
        worker.feed(happened.StepWanted())


def _on_asked(worker: "Worker") -> None:
    votes = barrier.outcome(worker)
    if votes is None:
        worker.await_stop()
        return
    if any(votes.values()):
        worker.machine.left = worker.state.version
    worker.want_step()


# --- the end ------------------------------------------------------------------------------------------------------
def _report_done(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.page.step = worker.page.version = worker.state.version
    worker.stamp(Phase.DONE)
    worker.report(
        ev.TrainingDone(
            process=worker.name,
            rank=worker.rank,
            generation=worker.machine.generation,
            version=worker.state.version,
            lineage=worker.state.lineage,
            state_digest=digest(worker),
            cut_collectives=0,
            doubts=len(worker.doubts),
        )
    )


def _on_done(worker: "Worker") -> None:
    if worker.machine.closed:
        worker.stamp(Phase.PARKED)
    worker.feed(happened.Ordered())


def _release(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    if worker.rank == 0:
        writes.stage(worker, worker.state)
        writes.confirm(worker, worker.state.version)
    worker.go_to("RELEASED")


def _on_released(worker: "Worker") -> None:
    worker.world.send(worker, ev.WorkerReleased(process=worker.name))
    worker.go_to("EXITING")


def _exit(status: int) -> Callable[["Worker"], None]:
    return lambda worker: worker.die(status)


def raise_in_script(worker: "Worker", summary: str) -> None:
    """The script raises: report, then leave; or stay, if a last checkpoint may need what is here."""
    worker.machine.handle(happened.ScriptFailed(saves=worker.lower is not None and bool(worker.lower.checkpoint_every)))
    is_held = worker.machine.state is Stand.HELD
    worker.report(
        ev.WorkerFailed(
            process=worker.name,
            rank=worker.rank,
            kind="exception",
            step=worker.page.step,
            phase=worker.page.phase.name,
            summary=summary,
            traceback=f"Traceback ...\n{summary}",
            noticed_ns=1,
            stands=is_held,
        ),
    )
    worker.todo = ()
    worker.go_to("STAYS" if is_held else "RAISED")


POINTS: dict[str, Callable[["Worker"], None]] = {
    **writes.POINTS,
    "START": _on_start,
    "LOADING": _on_loaded,
    "ENTERED": _on_begin,
    "WARMUP": _on_warm,
    "IDLE": _on_promoted,
    "PROMOTED": _on_first_recovery,
    "OUTSIDE": _begin_step,
    "FORWARD": _run_forward,
    "GRADIENT": _on_gradient,
    "DONE": _on_done,
    "RELEASED": _on_released,
    "EXITING": _exit(0),
    "RAISED": _exit(1),
    "AFTER_STEP": _after_step,
    "SHARE": _on_shared,
    "UNSHARED": _cut,
    "ASK": _on_asked,
}
CARRY_OUTS: dict[type[act.Action], Callable[..., happened.Event | None]] = {
    **writes.CARRY_OUTS,
    act.GoOnAlone: _go_on_alone,
    act.TakeRank: _take_rank,
    act.ReportEntered: _report_entered,
    act.ReportReady: _report_ready,
    act.AssignBuddies: _assign_buddies,
    act.OfferStep: _offer_step,
    act.ReportDone: _report_done,
    act.Release: _release,
}
