"""The table of a worker: which function decides, for each event in each state. A missing entry is a driver's bug."""

from collections.abc import Callable, Iterable, Mapping

from relight.core.protocol import commands
from relight.core.worker import events as ev
from relight.core.worker import orders, recovery, step
from relight.core.worker.actions import Actions
from relight.core.worker.states import State

Handler = Callable[..., Actions]
Table = Mapping[type, Mapping[State, Handler]]

_TRAINING = (State.OUTSIDE, State.IN_STEP, State.AT_BARRIER, State.WRITING)


def _in(states: Iterable[State], handler: Handler) -> dict[State, Handler]:
    return dict.fromkeys(states, handler)


TABLE: Table = {
    # --- orders, at any time
    commands.Stop: _in(State, orders.on_stop),
    commands.Assign: _in(State, orders.on_assign),
    commands.Begin: _in(State, orders.on_order),
    commands.Restore: _in(State, orders.on_order),
    commands.Resume: _in(State, orders.on_order),
    commands.Save: _in(State, orders.on_order),
    commands.Release: _in(State, orders.on_order),
    commands.WindDown: _in(State, orders.on_wind_down),
    # --- an order that the main thread waits for
    ev.Ordered: {
        State.STARTING: step.on_assigned,
        State.IDLE: step.on_assigned,
        State.ENTERED: step.on_begin,
        State.DONE: step.on_released,
        State.PARKED: recovery.on_decided,
        State.RESTORED: recovery.on_resume,
        **_in((State.COPYING, State.FORMING, State.SAVING, State.FAILED, State.HELD), recovery.on_superseded),
    },
    # --- start and end
    ev.ScriptEntered: {State.STARTING: step.on_entered},
    ev.StandbyWarm: {State.STARTING: step.on_warm},
    ev.ScriptFailed: _in(State, step.on_failed),
    # --- a step
    ev.StepWanted: {**_in(_TRAINING, step.on_wanted), State.PROMOTED: recovery.on_promoted},
    ev.StepEntered: {State.OUTSIDE: step.on_step_entered},
    ev.GradientsReady: {State.IN_STEP: step.on_gradients_ready},
    ev.StatesAgree: {State.IN_STEP: step.on_states_agree},
    ev.StatesDiffer: {State.IN_STEP: step.on_states_differ},
    ev.PrivateKept: {State.IN_STEP: step.on_private_kept},
    ev.BarrierPassed: {State.AT_BARRIER: step.on_barrier_passed},
    ev.BarrierPutOff: {State.AT_BARRIER: step.on_barrier_put_off},
    ev.CutShort: _in(State, step.on_cut_short),
    ev.WentOnAlone: _in(State, step.on_alone),
    ev.WaitsBetweenSteps: {State.OUTSIDE: recovery.on_waiting},
    ev.CodeRan: {State.OUTSIDE: step.on_code_ran},
    ev.StepUndone: {State.IN_STEP: step.on_undone},
    ev.StepFinished: {State.WRITING: step.on_finished},
    ev.CollectiveBroke: _in(State, step.on_broken),
    ev.Interrupted: _in((*_TRAINING, State.DONE), recovery.on_interrupted),
    # --- a recovery
    ev.StepLeft: _in((*_TRAINING, State.ORDERED), recovery.on_step_left),
    ev.SnapshotMissing: {State.COPYING: recovery.on_snapshot_missing},
    ev.StateTaken: {State.COPYING: recovery.on_taken},
    ev.ResultsTaken: {State.COPYING: recovery.on_results_taken},
    ev.GroupsFormed: {State.FORMING: recovery.on_formed},
    ev.RestoreFailed: _in((State.COPYING, State.FORMING), recovery.on_restore_failed),
    ev.PartSaved: {State.SAVING: recovery.on_saved},
}
