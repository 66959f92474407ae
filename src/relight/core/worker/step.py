"""Decisions while nothing fails: from the start of the script through each step to its end."""

from typing import TYPE_CHECKING

from relight.core.protocol.commands import Assign, Begin
from relight.core.protocol.commands import Release as ReleaseOrder
from relight.core.worker import actions as act
from relight.core.worker import events as ev
from relight.core.worker.recovery import WRITE, leave_step, pass_barrier, recover
from relight.core.worker.states import State

if TYPE_CHECKING:
    from relight.core.worker.worker import Worker

# Made once: a step allocates none of them.
_KEEP: act.Actions = (act.KeepPrivate(),)
_ENTER_BARRIER: act.Actions = (act.ShowPrepared(), act.EnterBarrier())
_WITHDRAW: act.Actions = (act.WithdrawPrepared(),)
_COMMIT: act.Actions = (act.Commit(),)
_FIRST_COMMIT: act.Actions = (act.Commit(), act.ReportResumed())
_OFFER: act.Actions = (act.OfferStep(),)
_DONE: act.Actions = (act.ReportDone(),)


_NO_SAVE = (State.STARTING, State.IDLE, State.PROMOTED, State.ENTERED, State.RELEASED)  # nothing orders one then


# --- start --------------------------------------------------------------------------------------------------------
def on_entered(worker: "Worker", event: ev.ScriptEntered) -> act.Actions:  # noqa: ARG001
    """Report what this initial rank holds, and wait for the others."""
    worker.state = State.ENTERED
    return (act.ReportEntered(),)


def on_begin(worker: "Worker", event: ev.Ordered) -> act.Actions:  # noqa: ARG001
    """Begin to train. Begin may have been lost: then it is a recovery that comes first."""
    worker.state = State.OUTSIDE
    begin: Begin | None = worker.orders.get(Begin)
    if begin is None:
        return ()
    worker.began = worker.agreed = worker.sound = worker.version  # of all ranks: the controller has compared them
    return () if worker.closed else (act.AssignBuddies(begin.buddies, begin.writers),)


def on_warm(worker: "Worker", event: ev.StandbyWarm) -> act.Actions:  # noqa: ARG001
    """Report that a rank may be given to this standby."""
    worker.state = State.IDLE
    return (act.ReportReady(),)


def on_assigned(worker: "Worker", event: ev.Ordered) -> act.Actions:  # noqa: ARG001
    """Take the rank."""
    assign: Assign = worker.orders[Assign]
    worker.rank, worker.generation = assign.rank, assign.generation
    if worker.is_standby:
        worker.state = State.PROMOTED
    return (act.TakeRank(),)


# --- a step -------------------------------------------------------------------------------------------------------
def on_wanted(worker: "Worker", event: ev.StepWanted) -> act.Actions:  # noqa: ARG001
    """Offer a step, unless there is none left or a recovery comes first.

    A step that was left without being committed, by the script or to be computed again, is offered again.
    """
    worker.state = State.OUTSIDE
    if worker.closed:
        return leave_step(worker)
    if worker.version < worker.goal:
        return _OFFER
    worker.state = State.DONE
    return _DONE


def on_step_entered(worker: "Worker", event: ev.StepEntered) -> act.Actions:  # noqa: ARG001
    """Begin a step: nothing of an earlier attempt counts."""
    worker.state = State.IN_STEP
    worker.started = worker.version
    worker.prepared = -1
    worker.passed = worker.wrote = worker.alone = worker.runs_code = False
    return ()


def on_gradients_ready(worker: "Worker", event: ev.GradientsReady) -> act.Actions:  # noqa: ARG001
    """Prepare for the barrier."""
    return _KEEP


def on_states_agree(worker: "Worker", event: ev.StatesAgree) -> act.Actions:  # noqa: ARG001
    """Remember it: memory that is corrupted later can be undone to here, and is in no gradient of this step."""
    worker.agreed = worker.version
    worker.sound = worker.version + 1
    return ()


def on_states_differ(worker: "Worker", event: ev.StatesDiffer) -> act.Actions:  # noqa: ARG001
    """Let the controller find out whose is wrong. The step is repeated without that rank."""
    return (act.ReportDifference(),)


def on_private_kept(worker: "Worker", event: ev.PrivateKept) -> act.Actions:  # noqa: ARG001
    """From here on this rank can finish the step by itself, and can still undo it."""
    worker.prepared = worker.version
    worker.state = State.AT_BARRIER
    return _ENTER_BARRIER


def on_barrier_passed(worker: "Worker", event: ev.BarrierPassed) -> act.Actions:
    """Write: every rank can finish this step, so no rank needs to go back."""
    if event.winds_down:
        worker.last = worker.version + 1
    return pass_barrier(worker, WRITE)


def on_barrier_put_off(worker: "Worker", event: ev.BarrierPutOff) -> act.Actions:  # noqa: ARG001
    """Be unprepared until the barrier comes again: no rank has passed it."""
    worker.prepared = -1
    worker.state = State.IN_STEP
    return _WITHDRAW


def on_cut_short(worker: "Worker", event: ev.CutShort) -> act.Actions:
    """Count this rank as torn: another one may have the right value."""
    worker.torn = True
    worker.torn_by = event.torn_by or worker.torn_by
    return ()


def on_alone(worker: "Worker", event: ev.WentOnAlone) -> act.Actions:  # noqa: ARG001
    """Remember it until the next step: what that code has changed may be of this rank alone."""
    worker.alone = True
    return ()


def on_code_ran(worker: "Worker", event: ev.CodeRan) -> act.Actions:
    """Remember what a replacement can be given that runs this code, until the next step is committed."""
    worker.gives = -1 if worker.alone else event.results
    return ()


def on_undone(worker: "Worker", event: ev.StepUndone) -> act.Actions:  # noqa: ARG001
    """Count the attempt; the loop asks for the step again."""
    worker.attempt += 1
    return ()


def on_finished(worker: "Worker", event: ev.StepFinished) -> act.Actions:
    """Commit: one more step is applied."""
    worker.version += 1
    worker.lineage = event.lineage
    worker.commits += 1
    worker.gives = -1
    worker.passed = False
    worker.attempt = 1 if worker.version < worker.begun_before else 0
    worker.state = State.OUTSIDE
    commit = _FIRST_COMMIT if worker.first_after_recovery else _COMMIT
    worker.first_after_recovery = False
    return _commit_surprise(worker, event.surprise, commit) if event.surprise else commit


def _commit_surprise(worker: "Worker", surprise: str, commit: act.Actions) -> act.Actions:
    """Keep private state anew. A rank that failed after the barrier left that of the barrier: then doubt the bits.

    A recovery that begins later does so as well, if it goes to this version.
    """
    worker.surprise = worker.version, surprise
    doubt = (act.Doubt(surprise),) if worker.closed else ()
    return (act.KeepPrivateAnew(), *commit, *doubt)


def on_broken(worker: "Worker", event: ev.CollectiveBroke) -> act.Actions:  # noqa: ARG001
    """Report it, unless the Stop that explains it is here already."""
    return () if worker.closed else (act.ReportBrokenCollective(),)


# --- the end ------------------------------------------------------------------------------------------------------
def on_released(worker: "Worker", event: ev.Ordered) -> act.Actions:  # noqa: ARG001
    """Leave, or go back to training if a recovery needs this rank first."""
    if worker.closed or ReleaseOrder not in worker.orders:
        return recover(worker)
    worker.state = State.RELEASED
    return (act.Release(),)


def on_failed(worker: "Worker", event: ev.ScriptFailed) -> act.Actions:
    """Exit, unless a last checkpoint may need what is here."""
    worker.state = State.HELD if worker.state not in _NO_SAVE and event.saves and worker.is_intact else State.ENDING
    worker.prepared = -1
    worker.has_failed = True
    return ()
