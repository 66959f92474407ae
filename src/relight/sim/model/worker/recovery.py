"""A simulated worker in a recovery: how the actions from Stop to Resume are carried out, and what it waits for.

The threads of a restore server and of a process group are modelled too: network.py.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from relight.core.protocol import events as ev
from relight.core.protocol.commands import FallbackTier, Resume, Save
from relight.core.protocol.position import Phase
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.states import State as Stand
from relight.sim.model.contents import Violation
from relight.sim.model.worker import taking
from relight.sim.model.worker.points import CONNECT_SECONDS, PATIENCE_SECONDS
from relight.sim.model.worker.step import digest, share
from relight.sim.model.worker.taking import fail, lack_private, order_of
from relight.sim.model.worker.writes import confirm, roll_back

if TYPE_CHECKING:
    from relight.sim.model.worker.worker import SimulatedWorker as Worker


# --- the link thread ----------------------------------------------------------------------------------------------
def _close_generation(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    break_connections(worker)
    leave_meeting(worker)
    if worker.copying is not None and not worker.copying.over:
        worker.copying.failed = "cancelled"
    if worker.offer is not None and worker.offer[0] < worker.machine.newest:
        worker.offer = None
    worker.world.offered(worker)


def vanish(worker: "Worker") -> None:
    """The process is gone: nothing of it arrives any more, and it serves nothing."""
    break_connections(worker)
    leave_meeting(worker)
    worker.offer = None
    worker.world.offered(worker)


def break_connections(worker: "Worker") -> None:
    """Break all collectives with this worker."""
    if worker.group_generation:
        worker.world.left(worker.world.group(worker.group_generation), worker.rank)


def leave_meeting(worker: "Worker") -> None:
    """Take back that this worker has come to a rendezvous."""
    if worker.meeting_generation:
        meeting = worker.world.rendezvous(worker.meeting_generation)
        if meeting is not None and worker.rank in meeting.present:
            meeting.absent.add(worker.rank)
            worker.world.left(meeting.group, worker.rank)


# --- Stop ---------------------------------------------------------------------------------------------------------
def _report_status(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    status, lower = worker.machine.status(), worker.lower
    worker.page.generation = status.generation
    worker.page.collectives = 0
    worker.report(
        ev.Stopped(
            process=worker.name,
            rank=worker.rank,
            generation=status.generation,
            step=status.step,
            version=status.version,
            lineage=status.lineage,
            prepared=status.prepared,
            torn=status.torn,
            blank=status.blank,
            stop_seconds=0.0,
            derivable=worker.world.derivable,
            restore_address=worker.name,
            snapshots=lower.held() if lower is not None else (),
            checkpoints=lower.checkpoints() if lower is not None else (),
            agreed=status.agreed,
            sound=status.sound,
            alone=status.alone,
            at_collective=status.at_collective,
            gives=status.gives,
            comes=status.comes,
        )
    )


def _on_parked(worker: "Worker") -> None:
    worker.feed(happened.Ordered())
    if worker.machine.state is Stand.ORDERED:
        if worker.page.torn and not worker.holds_nothing:
            raise Violation("I13: a recovery went on with a state that is half written")
        worker.stamp(Phase.PARKED)
        worker.feed(happened.StepLeft())


# --- Restore ------------------------------------------------------------------------------------------------------
def _leave_groups(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.group_generation = worker.meeting_generation = 0


def _begin_forming(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    machine = worker.machine
    assert machine.order is not None
    join(worker, machine.order.generation)


def join(worker: "Worker", generation: int) -> None:
    """Come to the rendezvous of a generation, unless its store is closed."""
    meeting = worker.world.rendezvous(generation) if worker.machine.newest <= generation else None
    if meeting is not None:
        meeting.join(worker.rank)
        worker.meeting_generation = generation
        worker.world.joined(meeting)


def _await_copies(worker: "Worker", action: act.Action) -> None:
    """Copies for snapshots are made at once."""


def _roll_back(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    roll_back(worker)
    worker.page.withdraw_private(worker.machine.version + 1)


def _offer(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    restore = order_of(worker)
    if not worker.machine.is_superseded or restore.tier is FallbackTier.CHECKPOINT:
        machine = worker.machine
        results = machine.at_collective - 1 if machine.at_collective else max(machine.gives, 0)
        worker.offer = (restore.generation, worker.state, results)
        worker.world.offered(worker)


# --- the new group, and Resume ------------------------------------------------------------------------------------
def _await_groups(worker: "Worker", action: act.Action) -> happened.Event | None:  # noqa: ARG001
    if not worker.machine.is_superseded and not worker.meeting_generation:
        return happened.RestoreFailed("the rendezvous of that generation is closed")
    worker.go_to("REFORM")
    return None


def _on_formed(worker: "Worker") -> None:
    if worker.machine.is_superseded:
        _supersede(worker)
    else:
        worker.feed(happened.GroupsFormed())


def _report_restored(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    offered = worker.offer
    worker.report(
        ev.Restored(
            process=worker.name,
            rank=worker.rank,
            generation=order_of(worker).generation,
            version=worker.machine.version,
            lineage=worker.machine.lineage,
            state_digest=digest(worker, None if offered is None else offered[1]),  # as it was sent
            layout_digest="layout",
            progress=ev.RestoreProgress(),
            alone=worker.machine.alone,
        )
    )


def _on_restored(worker: "Worker") -> None:
    if worker.machine.order_of(Resume, order_of(worker).generation) is not None:
        worker.go_to("RESUME")
    else:
        _supersede(worker)


def _on_resume(worker: "Worker") -> None:
    if worker.machine.is_superseded:
        _supersede(worker)
        return
    was_waiting = worker.machine.at_collective
    if worker.rank in order_of(worker).given:
        assert worker.copying is not None
        worker.shared = worker.copying.results
    worker.feed(happened.Ordered())
    confirm(worker, worker.state.version)
    if was_waiting or worker.machine.runs_code:
        share(worker)
    else:
        worker.shared = 0
        worker.want_step()


def _open_generation(worker: "Worker", action: act.Action) -> None:  # noqa: ARG001
    worker.group_generation = worker.machine.generation
    worker.meeting_generation = 0
    worker.copying = None
    worker.page.prepared = -1
    worker.learner = worker.learner.anew()


def _discard_distrusted(worker: "Worker", action: act.DiscardDistrusted) -> None:
    if worker.lower is not None and worker.rank == 0:
        worker.lower.disk.discard(action.version)


# --- failures -----------------------------------------------------------------------------------------------------
def _supersede(worker: "Worker") -> None:
    """A newer Stop came first."""
    worker.stamp(Phase.PARKED)
    worker.feed(happened.Ordered())


def _report_restore_failure(worker: "Worker", action: act.ReportRestoreFailure) -> None:
    order = worker.machine.order
    assert order is not None
    worker.copying = None
    worker.report(ev.RestoreFailed(process=worker.name, generation=order.generation, evidence=action.evidence))


def lose_patience(worker: "Worker") -> None:
    """End a wait of a recovery that has taken too long."""
    if worker.point == "COPY":
        fail(worker, "no answer from the source")
    elif worker.point == "PRIVATE":
        lack_private(worker)
    elif worker.point == "SAVING":
        worker.feed(happened.PartSaved(error="not all of it is there"))
    elif worker.point == "REFORM":
        meeting = worker.world.rendezvous(worker.meeting_generation)
        if not worker.waits_on and meeting is not None and meeting.complete:
            worker.waits_on = True  # all have come: now it is the connections that it waits for
            worker.world.plan_patience(worker, CONNECT_SECONDS - PATIENCE_SECONDS["REFORM"])
            return
        fail(worker, "the new process group could not be formed")


# --- Save ---------------------------------------------------------------------------------------------------------
def _save_part(worker: "Worker", action: act.Action) -> happened.PartSaved | None:  # noqa: ARG001
    save = worker.machine.order
    assert isinstance(save, Save)
    worker.world.saves(worker, save)
    if worker.rank != save.rank:
        return happened.PartSaved()
    worker.go_to("SAVING")
    return None


def _on_saved(worker: "Worker") -> None:
    if worker.machine.is_superseded:
        _supersede(worker)
    else:
        worker.feed(happened.PartSaved(path="there"))


def _report_saved(worker: "Worker", action: act.ReportSaved) -> None:
    save = worker.machine.order
    assert save is not None
    worker.report(
        ev.Saved(
            process=worker.name,
            generation=save.generation,
            version=save.target,
            path=action.path,
            error=action.error,
        )
    )


# --- what is waited for -------------------------------------------------------------------------------------------
def is_formed(worker: "Worker", generation: int) -> bool:
    """Return whether this worker is through with forming the group."""
    if worker.meeting_generation != generation:
        return False
    meeting = worker.world.rendezvous(generation)
    return meeting is not None and worker.rank in meeting.connected


def _has_formed(worker: "Worker") -> bool:
    return worker.machine.is_superseded or is_formed(worker, order_of(worker).generation)


def _has_saved(worker: "Worker") -> bool:
    save = worker.machine.order
    return worker.machine.is_superseded or (isinstance(save, Save) and worker.world.is_saved(save))


READY: dict[str, Callable[["Worker"], bool]] = {
    **taking.READY,
    "REFORM": _has_formed,
    "SAVING": _has_saved,
}
POINTS: dict[str, Callable[["Worker"], None]] = {
    **taking.POINTS,
    "PARKED": _on_parked,
    "REFORM": _on_formed,
    "RESTORED": _on_restored,
    "RESUME": _on_resume,
    "FAILED": _supersede,
    "SAVING": _on_saved,
    "STAYS": _supersede,
}
CARRY_OUTS: dict[type[act.Action], Callable[..., happened.Event | None]] = {
    **taking.CARRY_OUTS,
    act.CloseGeneration: _close_generation,
    act.ReportStatus: _report_status,
    act.LeaveGroups: _leave_groups,
    act.BeginForming: _begin_forming,
    act.AwaitCopies: _await_copies,
    act.RollBack: _roll_back,
    act.Offer: _offer,
    act.AwaitGroups: _await_groups,
    act.ReportRestored: _report_restored,
    act.OpenGeneration: _open_generation,
    act.DiscardDistrusted: _discard_distrusted,
    act.ReportRestoreFailure: _report_restore_failure,
    act.SavePart: _save_part,
    act.ReportSaved: _report_saved,
}
