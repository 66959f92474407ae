"""Decisions of a recovery: from the interruption of a step until training resumes.

    PARKED -> ORDERED -> COPYING -> FORMING -> RESTORED -> OUTSIDE      Restore
                      -> SAVING -> FAILED                               Save
    any of these -> FAILED -> PARKED                                    the restore failed, and another one follows
    any of these -> PARKED                                              a newer Stop came: report again

A prepared rank that is to go forward finishes its step between PARKED and ORDERED.
"""

from typing import TYPE_CHECKING

from relight.core.protocol.commands import FallbackTier, Restore, Resume, Save
from relight.core.worker import actions as act
from relight.core.worker import events as ev
from relight.core.worker.states import State

if TYPE_CHECKING:
    from relight.core.worker.worker import Worker

_REPORT: act.Actions = (act.ReportStatus(),)
WRITE: act.Actions = (act.ConfirmVersion(), act.BeginWrite())
_FINISH: act.Actions = (act.FinishStep(), *WRITE)
FOLLOWED = "its copy of another rank's state was cut short"  # in place of a state of its own
_CLAIM: act.Actions = (act.ClaimVersion(),)
_FORM: act.Actions = (act.AwaitGroups(),)
_ALONE: act.Actions = (act.GoOnAlone(),)


# --- Stop: the status, and the decision ---------------------------------------------------------------------------
def on_interrupted(worker: "Worker", event: ev.Interrupted) -> act.Actions:  # noqa: ARG001
    """Give up what the main thread was doing. After a barrier that is a step that nothing undoes."""
    worker.torn |= worker.passed
    return recover(worker)


def on_promoted(worker: "Worker", event: ev.StepWanted) -> act.Actions:  # noqa: ARG001
    """Take part in the recovery that this rank was given for."""
    worker.closed = True
    return recover(worker)


def on_waiting(worker: "Worker", event: ev.WaitsBetweenSteps) -> act.Actions:
    """Wait in a collective between two steps until all ranks can meet there, or go on alone."""
    worker.at_collective = event.collective
    return recover(worker)


def recover(worker: "Worker") -> act.Actions:
    """Carry out the decision in hand if it is still the newest; else report, and wait for one."""
    if worker.is_superseded:
        worker.order = None
    if worker.at_collective and not _may_wait(worker):
        worker.at_collective = 0
        worker.state = State.OUTSIDE
        return _ALONE
    if worker.order is not None:
        return obey(worker, worker.order)
    worker.reported = worker.newest
    worker.state = State.PARKED
    return _REPORT


def _may_wait(worker: "Worker") -> bool:
    """Return whether a rank in a collective between two steps waits for others; by the decision, if it is here."""
    if worker.order is None:
        return not worker.go_alone
    order = worker.order
    return isinstance(order, Restore) and (order.meets_at > 0 or worker.rank in order.given)


def on_superseded(worker: "Worker", event: ev.Ordered) -> act.Actions:  # noqa: ARG001
    """A newer Stop came: what is under way does not count, and all ranks report anew."""
    return recover(worker)


def on_decided(worker: "Worker", event: ev.Ordered) -> act.Actions:  # noqa: ARG001
    """Take the order. It comes first, even if a newer Stop is here too: others may count on the step."""
    order = worker.order_of(Restore, worker.reported) or worker.order_of(Save, worker.reported)
    if order is None:
        return recover(worker)
    worker.order = order
    worker.state = State.ORDERED
    if worker.prepared == worker.version and not worker.blank:
        worker.prepared = -1  # it leaves the barrier, one way or the other
        if order.target == worker.version + 1:
            return finish_step(worker)
    return ()


def finish_step(worker: "Worker") -> act.Actions:
    """Finish a step whose barrier broke, as was decided."""
    return pass_barrier(worker, _FINISH)


def pass_barrier(worker: "Worker", actions: act.Actions) -> act.Actions:
    """Count the barrier as passed."""
    worker.prepared = -1
    worker.passed = True
    worker.state = State.WRITING
    return actions


def on_step_left(worker: "Worker", event: ev.StepLeft) -> act.Actions:
    """Carry out the decision, or ask for one."""
    worker.torn |= not event.can_be_undone
    worker.torn_by = event.torn_by or worker.torn_by
    return leave_step(worker)


def leave_step(worker: "Worker") -> act.Actions:
    """Recover. Nothing of an interrupted step runs any more, so this rank cannot finish it."""
    worker.torn |= worker.passed
    worker.prepared = -1
    return recover(worker)


# --- Restore ------------------------------------------------------------------------------------------------------
def obey(worker: "Worker", order: Restore | Save) -> act.Actions:
    """Reach the target version."""
    if isinstance(order, Save):
        return _save(worker, order)
    if worker.has_failed:  # it will be killed, and is kept for a checkpoint only
        worker.state = State.FAILED
        return ()
    worker.history = order.history
    begin = (act.LeaveGroups(), *_doubts(worker, order.target), act.BeginForming(), act.AwaitCopies())
    if order.tier is not FallbackTier.REPLICA:
        return (*begin, act.DiscardUndone(), *_go_down(worker, order))
    if worker.rank in order.targets:
        worker.state = State.COPYING
        return (*begin, *_give_up_own(worker), act.Copy())
    if why := _obstacle(worker, order):
        return (*begin, *fail(worker, f"rank {worker.rank} {why}"))
    if worker.rank in order.given:
        worker.state = State.COPYING
        return (*begin, act.RollBack(), act.TakeResults())
    worker.state = State.FORMING
    offer = (act.Offer(),) if order.targets or order.given else ()
    return (*begin, act.RollBack(), *offer, *_FORM)


def _obstacle(worker: "Worker", order: Restore) -> str:
    """Return the reason why this rank cannot go on from its own state as it is ordered, or an empty string."""
    at = worker.at_collective
    if worker.rank in order.given:
        is_there = at > 0 and (at < order.meets_at or not order.meets_at)
    else:
        has_run_all = order.meets_at == 1 and worker.gives == 0  # it has finished the step, and that code calls none
        is_there = at == order.meets_at or has_run_all
    if order.runs_code and not is_there:
        meeting = f"collective {order.meets_at}" if order.meets_at else "the end"
        return f"came to {f'collective {at}' if at else 'none'}, not to {meeting} of the code between two steps"
    if worker.version != order.target:
        return f"is at version {worker.version}, not {order.target}"
    if not worker.is_intact:
        why = "it holds nothing whole" if worker.blank else "its step was interrupted where it could not be undone"
        return f"is to go on from its own state, but {why}"
    return ""


def _give_up_own(worker: "Worker") -> act.Actions:
    """Follow another rank, since states differ: the own one is whole, and is worth nothing from here on."""
    if not worker.is_intact:
        return ()
    worker.torn, worker.torn_by = True, FOLLOWED
    return (act.KeepPrivateAnew(),) if worker.alone else ()


def _doubts(worker: "Worker", target: int) -> act.Actions:
    """Doubt the bits if all go on from the end of a surprise: some rank may have failed inside.

    Its private state is that of the barrier then. Every rank that knows says so, since one may be lost.
    """
    version, surprise = worker.surprise
    if version == target:
        return (act.Doubt(surprise),)
    if worker.torn and worker.torn_by != FOLLOWED and worker.version + 1 == target:
        return (act.Doubt(f"step {worker.version} was interrupted after its barrier, and goes on from other ranks"),)
    return ()


def _go_down(worker: "Worker", order: Restore) -> act.Actions:
    """Take the target from below replicas. From here until it is there this rank is blank.

    Should the recovery begin again, it must not be a source of what it holds.
    """
    is_target = worker.rank in order.targets
    worker.was_there = not (worker.blank or worker.torn) and worker.version == order.target
    worker.blank = True
    worker.state = State.COPYING
    if order.tier is FallbackTier.CHECKPOINT:
        return (act.Copy(),) if is_target else (act.ReadCheckpoint(),)
    return (act.FetchSnapshot(),) if is_target else (act.RecallSnapshot(),)


def on_snapshot_missing(worker: "Worker", event: ev.SnapshotMissing) -> act.Actions:  # noqa: ARG001
    """Stay, if this rank had gone back already when the recovery began again; else ask another rank."""
    if not worker.was_there:
        return (act.FetchSnapshot(),)
    worker.blank = False
    worker.state = State.FORMING
    return (act.RollBack(), *_CLAIM, *_FORM)


def on_taken(worker: "Worker", event: ev.StateTaken) -> act.Actions:
    """Hold the target version, and nothing of a step."""
    worker.version, worker.lineage, worker.until = event.version, event.lineage, event.until
    worker.blank = worker.torn = worker.passed = worker.alone = False
    worker.at_collective, worker.gives = 0, -1
    worker.torn_by = ""
    worker.state = State.FORMING
    order = worker.order
    reads = isinstance(order, Restore) and order.tier is FallbackTier.CHECKPOINT and worker.rank not in order.targets
    offer = (act.Offer(),) if reads else ()
    return (*_CLAIM, *offer, *_FORM)


def on_results_taken(worker: "Worker", event: ev.ResultsTaken) -> act.Actions:  # noqa: ARG001
    """Form the new group with the others. Resumed, this rank goes on to where they are."""
    worker.state = State.FORMING
    return _FORM


def fail(worker: "Worker", evidence: str) -> act.Actions:
    """Give up this restore: the controller opens another generation."""
    worker.state = State.FAILED
    return (act.ReportRestoreFailure(evidence),)


def on_restore_failed(worker: "Worker", event: ev.RestoreFailed) -> act.Actions:
    """Say why."""
    return fail(worker, event.evidence)


def on_formed(worker: "Worker", event: ev.GroupsFormed) -> act.Actions:  # noqa: ARG001
    """Report the version that is here."""
    worker.state = State.RESTORED
    return (act.ReportRestored(),)


# --- Resume -------------------------------------------------------------------------------------------------------
def on_resume(worker: "Worker", event: ev.Ordered) -> act.Actions:  # noqa: ARG001
    """Open the generation and train on. A newer Stop comes first."""
    order = worker.order
    assert isinstance(order, Restore)
    resume: Resume | None = worker.order_of(Resume, order.generation)
    if worker.is_superseded or resume is None:
        return recover(worker)
    worker.generation = order.generation
    worker.closed = worker.is_standby = worker.alone = False
    worker.at_collective = 0
    worker.runs_code = order.runs_code and worker.rank in order.targets
    # All ranks hold it, or there would be no Resume; a bit that flips before the next gradient is in that.
    worker.began = worker.agreed = worker.sound = order.target
    worker.attempt = order.attempt
    if order.undone:
        worker.begun_before = order.target + order.undone + 1
    worker.last = None  # others may not have heard of it: the next barrier says it to all
    worker.first_after_recovery = True
    worker.order = None
    worker.state = State.OUTSIDE
    discard = (act.DiscardDistrusted(order.distrust),) if order.distrust >= 0 else ()
    return (act.OpenGeneration(), *discard, act.AssignBuddies(resume.buddies, resume.writers, order.keep))


# --- Save ---------------------------------------------------------------------------------------------------------
def _save(worker: "Worker", order: Save) -> act.Actions:
    """Write this rank's part of a last checkpoint; the job ends after it."""
    if worker.blank:
        worker.state = State.FAILED
        return ()
    worker.state = State.SAVING
    leave = (act.LeaveGroups(), *_doubts(worker, order.target), act.AwaitCopies())
    if worker.torn:
        return (*leave, act.SavePart())
    if worker.version != order.target:
        error = f"rank {worker.rank}: it holds version {worker.version}, not {order.target}"
        return (*leave, *on_saved(worker, ev.PartSaved(error=error)))
    return (*leave, act.RollBack(), act.SavePart())


def on_saved(worker: "Worker", event: ev.PartSaved) -> act.Actions:
    """Say that the checkpoint is complete, or what went wrong; then wait for the end."""
    worker.state = State.FAILED
    return (act.ReportSaved(event.path, event.error),) if event.path or event.error else ()
