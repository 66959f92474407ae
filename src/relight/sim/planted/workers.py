"""Workers that decide otherwise: variants of `core/worker`, by an entry of its table or a method of its value."""

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from relight.core.protocol import commands
from relight.core.worker import actions as act
from relight.core.worker import events as ev
from relight.core.worker import recovery, step
from relight.core.worker.states import State
from relight.core.worker.table import TABLE, Handler, Table
from relight.core.worker.worker import RankStatus, Worker


def with_handler(event: type, states: tuple[State, ...], handler: Handler) -> Table:
    """The table with another handler for this event in these states."""
    return {**TABLE, event: {**TABLE[event], **dict.fromkeys(states, handler)}}


def _without(handler: Callable[..., act.Actions], *kinds: type[act.Action]) -> Handler:
    """The production decision without actions of these kinds."""
    return lambda worker, event: tuple(a for a in handler(worker, event) if not isinstance(a, kinds))


# --- the barrier --------------------------------------------------------------------------------------------------
class HasNoBarrier(Worker):
    """A20: nothing between the gradient's all-reduce and the write."""

    @staticmethod
    def _kept(worker: Worker, event: ev.PrivateKept) -> act.Actions:
        step.on_private_kept(worker, event)
        return (act.ShowPrepared(), *recovery.pass_barrier(worker, (act.BeginWrite(),)))

    table: ClassVar[Table] = with_handler(ev.PrivateKept, (State.IN_STEP,), _kept)


class PublishesItsOwnStep(Worker):
    """Engines answer with a version as soon as rank 0 has finished it, while others may still write."""

    @staticmethod
    def _wanted(worker: Worker, event: ev.StepWanted) -> act.Actions:
        actions = step.on_wanted(worker, event)
        return (*actions, act.ConfirmVersion()) if act.OfferStep() in actions else actions

    table: ClassVar[Table] = with_handler(ev.StepWanted, (State.OUTSIDE,), _wanted)


# --- Stop ---------------------------------------------------------------------------------------------------------
class StopsInsideTheWrite(Worker):
    """A12: Stop interrupts the optimizer, and every survivor is torn."""

    @staticmethod
    def _finished(worker: Worker, event: ev.StepFinished) -> act.Actions:
        if worker.closed and worker.order is None:
            return recovery.on_interrupted(worker, ev.Interrupted())
        return step.on_finished(worker, event)

    table: ClassVar[Table] = with_handler(ev.StepFinished, (State.WRITING,), _finished)


class AnswersStopAtOnce(Worker):
    """The thread that hears Stop answers it, and the main thread is still inside the write."""

    @staticmethod
    def _stop(worker: Worker, stop: commands.Stop) -> act.Actions:
        actions = TABLE[commands.Stop][worker.state](worker, stop)
        if not actions:
            return ()
        worker.reported = worker.newest
        return (*actions, act.ReportStatus())

    def status(self) -> RankStatus:
        return msgspec.structs.replace(super().status(), torn=self.torn or self.passed)

    table: ClassVar[Table] = with_handler(commands.Stop, (State.WRITING,), _stop)


class ForgetsItsPreparation(Worker):
    """A survivor reports its version, and not that it could finish the step."""

    def status(self) -> RankStatus:
        return msgspec.structs.replace(super().status(), prepared=-1)


class RollsBackBeforeTheDecision(Worker):
    """A prepared rank undoes its writes as soon as it is paused; should it go forward, it commits the old state."""

    @staticmethod
    def _interrupted(worker: Worker, event: ev.Interrupted) -> act.Actions:
        return (act.RollBack(), *recovery.on_interrupted(worker, event))

    table: ClassVar[Table] = with_handler(ev.Interrupted, (State.IN_STEP, State.AT_BARRIER), _interrupted)


class TakesASurpriseForIntact(Worker):
    """A rank that is interrupted in what came after the barrier, against what was learnt, says that it is intact."""

    @staticmethod
    def _interrupted(worker: Worker, event: ev.Interrupted) -> act.Actions:  # noqa: ARG004
        worker.passed = False
        return recovery.recover(worker)

    table: ClassVar[Table] = with_handler(ev.Interrupted, (State.WRITING,), _interrupted)


class DoubtsNothing(Worker):
    """A surprise is committed as if it had been learnt, so a failure inside it is not said to put the bits in doubt."""

    @staticmethod
    def _finished(worker: Worker, event: ev.StepFinished) -> act.Actions:
        actions = step.on_finished(worker, event)
        worker.surprise = (-1, "")
        return tuple(a for a in actions if not isinstance(a, act.Doubt))

    table: ClassVar[Table] = with_handler(ev.StepFinished, (State.WRITING,), _finished)


class DoubtsOnlyWhatWasClosed(Worker):
    """Only a rank that knew of the failure when it committed a surprise doubts the bits."""

    @staticmethod
    def _finished(worker: Worker, event: ev.StepFinished) -> act.Actions:
        actions = step.on_finished(worker, event)
        worker.surprise = (-1, "")
        return actions

    table: ClassVar[Table] = with_handler(ev.StepFinished, (State.WRITING,), _finished)


class DoubtsEverySurprise(Worker):
    """A rank doubts the bits of a surprise after a recovery that nothing of it was lost in."""

    @staticmethod
    def _finished(worker: Worker, event: ev.StepFinished) -> act.Actions:
        actions = step.on_finished(worker, event)
        return (*actions, act.Doubt(event.surprise)) if event.surprise and not worker.closed else actions

    table: ClassVar[Table] = with_handler(ev.StepFinished, (State.WRITING,), _finished)


class TrustsTheHandshake(Worker):
    """A defect of an earlier version: where states had been compared in a handshake, the gradients of the step after it
    counted as compared as well, so a rank that was found to differ in the next one was not said to be in them."""

    def status(self) -> RankStatus:
        return msgspec.structs.replace(super().status(), sound=self.agreed + 1)


# --- orders -------------------------------------------------------------------------------------------------------
class ObeysOldOrders(Worker):
    """Restore and Resume are obeyed whatever generation they are of."""

    def order_of(self, kind: type, generation: int) -> Any:  # noqa: ARG002
        return self.orders.get(kind)


class WaitsForBeginOnly(Worker):
    """A defect of an earlier version: a rank whose Begin was lost with its agent did not hear Stop either."""

    @property
    def is_ready(self) -> bool:
        return super().is_ready and not (self.state is State.ENTERED and self.closed)


class LeavesAlone(Worker):
    """Done is done: after its last step a rank leaves without waiting for the others."""

    @property
    def is_ready(self) -> bool:
        return self.state is State.DONE or super().is_ready

    @staticmethod
    def _done(worker: Worker, event: ev.Ordered) -> act.Actions:
        if worker.closed:
            return step.on_released(worker, event)
        worker.state = State.RELEASED
        return (act.Release(),)

    table: ClassVar[Table] = with_handler(ev.Ordered, (State.DONE,), _done)


# --- Restore ------------------------------------------------------------------------------------------------------
class KeepsWhatThePreparedWrote(Worker):
    """A rank that was prepared and is sent back keeps what it wrote."""

    @staticmethod
    def _decided(worker: Worker, event: ev.Ordered) -> act.Actions:
        was_prepared = worker.prepared == worker.version
        actions = recovery.on_decided(worker, event)
        worker.keeps_writes = was_prepared and worker.state is State.ORDERED  # type: ignore[attr-defined]
        return actions

    @staticmethod
    def _left(worker: Worker, event: ev.StepLeft) -> act.Actions:
        actions = recovery.on_step_left(worker, event)
        return tuple(a for a in actions if not (worker.keeps_writes and isinstance(a, act.RollBack)))  # type: ignore[attr-defined]

    table: ClassVar[Table] = {
        **with_handler(ev.StepLeft, (State.ORDERED,), _left),
        ev.Ordered: with_handler(ev.Ordered, (State.PARKED,), _decided)[ev.Ordered],
    }


class OffersBeforeItRollsBack(Worker):
    """A source serves its state first and undoes its writes then."""

    @staticmethod
    def _left(worker: Worker, event: ev.StepLeft) -> act.Actions:
        actions = recovery.on_step_left(worker, event)
        if act.Offer() not in actions or act.RollBack() not in actions:
            return actions
        others = [a for a in actions if not isinstance(a, act.Offer | act.RollBack)]
        return (*others[:-1], act.Offer(), act.RollBack(), others[-1])

    table: ClassVar[Table] = with_handler(ev.StepLeft, (State.ORDERED,), _left)


class IsCalledBlankOnceItCopies(Worker):
    """A torn rank reports that it is blank once it has begun to copy: then its private state is not looked for, which
    it has beside its own page."""

    @staticmethod
    def _left(worker: Worker, event: ev.StepLeft) -> act.Actions:
        actions = recovery.on_step_left(worker, event)
        worker.blank |= act.Copy() in actions
        return actions

    table: ClassVar[Table] = with_handler(ev.StepLeft, (State.ORDERED,), _left)


class CountsAReplacementAsPrepared(Worker):
    """A replacement takes over that its predecessor was prepared, with the state from before the step."""

    @staticmethod
    def _taken(worker: Worker, event: ev.StateTaken) -> act.Actions:
        actions = recovery.on_taken(worker, event)
        worker.prepared = worker.version
        return actions

    table: ClassVar[Table] = with_handler(ev.StateTaken, (State.COPYING,), _taken)


class SavesWhatWasWritten(Worker):
    """The last checkpoint is written without undoing what the interrupted step has written."""

    @staticmethod
    def _left(worker: Worker, event: ev.StepLeft) -> act.Actions:
        actions = recovery.on_step_left(worker, event)
        return tuple(a for a in actions if not isinstance(a, act.RollBack)) if act.SavePart() in actions else actions

    table: ClassVar[Table] = with_handler(ev.StepLeft, (State.ORDERED,), _left)


class DoesNotClaimPrivateState(Worker):
    """A defect of an earlier version: a replacement that died in its first step left a page that named no private
    state.
    """

    table: ClassVar[Table] = with_handler(
        ev.StateTaken, (State.COPYING,), _without(recovery.on_taken, act.ClaimVersion)
    )
