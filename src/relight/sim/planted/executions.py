"""Workers that carry actions out otherwise: variants of `sim/model`, where the real driver could be wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from relight.core.protocol.events import Event, Saved
from relight.core.worker import actions as act
from relight.core.worker import events as happened
from relight.core.worker.snapshots import SnapshotSlots
from relight.core.worker.states import State as Stand
from relight.sim.model.contents import next_private
from relight.sim.model.fallback_tiers import FallbackTiers, SavedSlot
from relight.sim.model.shapes import Shape, learner
from relight.sim.model.worker import recovery, writes
from relight.sim.model.worker.worker import CarryOut, Continue, SimulatedWorker

_POINTS = SimulatedWorker.points
_CARRY_OUTS = SimulatedWorker.carry_outs


def _then(original: Continue, more: Continue) -> Continue:
    """First as the original, then more."""

    def go(worker: SimulatedWorker) -> None:
        original(worker)
        more(worker)

    return go


def _after(action: type[act.Action], more: Continue) -> dict[type[act.Action], CarryOut]:
    """All carry-outs, with more after this action."""

    def carry_out(worker: SimulatedWorker, done: act.Action) -> happened.Event | None:
        event = _CARRY_OUTS[action](worker, done)
        more(worker)
        return event

    return {**_CARRY_OUTS, action: carry_out}


# --- copies and the rendezvous ------------------------------------------------------------------------------------
class RestoresInPlace(SimulatedWorker):
    """A copy counts as a replica from its first byte on."""

    @staticmethod
    def _claim(worker: SimulatedWorker) -> None:
        machine = worker.machine
        assert machine.order is not None
        machine.version = machine.order.target
        machine.blank = machine.torn = worker.page.torn = False
        worker.state = worker.state._replace(version=machine.version, content=-1)

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = _after(act.Copy, _claim)


class MeetsWithoutGeneration(SimulatedWorker):
    """D1: the generation is missing from the keys of the rendezvous."""

    @staticmethod
    def _join(worker: SimulatedWorker, action: act.Action) -> None:  # noqa: ARG004
        machine = worker.machine
        assert machine.order is not None
        generation = machine.order.generation
        first: int = min(worker.world.meetings, default=generation)  # type: ignore[attr-defined]
        recovery.join(worker, first if machine.newest <= generation else generation)

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = {**_CARRY_OUTS, act.BeginForming: _join}

    def can_go(self) -> bool:
        if self.point == "REFORM":
            return self.machine.is_superseded or recovery.is_formed(self, self.meeting_generation)
        return super().can_go()


class KeepsPrivateStateTooLate(SimulatedWorker):
    """Keeps it after the barrier: a rank that dies between the two leaves peers that are ahead of its private state."""

    @staticmethod
    def _keep(worker: SimulatedWorker) -> None:
        _CARRY_OUTS[act.KeepPrivate](worker, act.KeepPrivate())

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = {
        **_after(act.ConfirmVersion, _keep),
        act.KeepPrivate: lambda worker, action: happened.PrivateKept(),  # noqa: ARG005
    }


class ComparesInTheBarrier(SimulatedWorker):
    """A defect of an earlier version: ranks were prepared before their states were compared. A rank that had not heard
    the result, since another one died or only the corrupted one said it, finished the step with a gradient from a
    wrong state.
    """

    @staticmethod
    def _prepare(worker: SimulatedWorker) -> None:
        if worker.point == "COMPARE":
            _CARRY_OUTS[act.KeepPrivate](worker, act.KeepPrivate())
            worker.page.prepared = worker.machine.prepared = worker.machine.version

    points: ClassVar[Mapping[str, Continue]] = {
        **_POINTS,
        "GRADIENT": _then(_POINTS["GRADIENT"], _prepare),
        "SECOND": _then(_POINTS["SECOND"], _prepare),
        "LAST_WRITE": _then(_POINTS["LAST_WRITE"], _prepare),
    }


class RepeatsWithAnotherBatch(SimulatedWorker):
    """A repeated step draws the next batch, and the private state that belongs to it."""

    @staticmethod
    def _draw_again(worker: SimulatedWorker) -> None:
        if worker.machine.state is Stand.PARKED:
            worker.private = hash((9, worker.private))

    points: ClassVar[Mapping[str, Continue]] = {
        **_POINTS,
        "FORWARD": _then(_POINTS["FORWARD"], _draw_again),
        "GRADIENT": _then(_POINTS["GRADIENT"], _draw_again),
    }


class PublishesEarly(SimulatedWorker):
    """Engines answer with a version as soon as rank 0 has its gradient: one step early."""

    @staticmethod
    def _publish(worker: SimulatedWorker) -> None:
        writes.stage(worker, writes.all_written(worker).committed())
        writes.confirm(worker, worker.state.version + 1)

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = _after(act.ShowPrepared, _publish)


class SaysOnceThatItHasSaved(SimulatedWorker):
    """A defect of an earlier version: that the last checkpoint is complete was lost with an agent, and was not said
    again.
    """

    def report(self, event: Event) -> None:
        if isinstance(event, Saved):
            self.world.send(self, event)
        else:
            super().report(event)


# --- snapshots and checkpoints ------------------------------------------------------------------------------------
class _OnlySlot(SnapshotSlots[SavedSlot]):
    def overwritable(self, slots: list[SavedSlot]) -> list[SavedSlot]:
        return slots[:1]


class _TiersWithOneSlot(FallbackTiers):
    slots_kind: ClassVar[type[SnapshotSlots[SavedSlot]]] = _OnlySlot


class OverwritesTheOnlySnapshot(SimulatedWorker):
    """The next snapshot goes over the last one that is complete everywhere."""

    tiers_kind: ClassVar[type[FallbackTiers]] = _TiersWithOneSlot


class _EstablishedAtOnce(SnapshotSlots[SavedSlot]):
    def assign(self, rank: int, buddies: Sequence[int], keep: int) -> None:
        super().assign(rank, buddies, keep)
        self.established, self._holders = keep, (self.rank, self.ward)


class _TakesKeptForEstablished(FallbackTiers):
    slots_kind: ClassVar[type[SnapshotSlots[SavedSlot]]] = _EstablishedAtOnce


class TakesKeptForEstablished(SimulatedWorker):
    """A defect of an earlier version: buddies had changed, and the version that all had gone back to counted as
    established, though the new ones had yet to fetch it. What an earlier buddy had, the only copy, was overwritten.
    """

    tiers_kind: ClassVar[type[FallbackTiers]] = _TakesKeptForEstablished


class _NothingNeeded(SnapshotSlots[SavedSlot]):
    def assign(self, rank: int, buddies: Sequence[int], keep: int) -> None:  # noqa: ARG002
        super().assign(rank, buddies, -1)


class _KeepsNothing(FallbackTiers):
    slots_kind: ClassVar[type[SnapshotSlots[SavedSlot]]] = _NothingNeeded


class ForgetsWhatToKeep(SimulatedWorker):
    """Lets each rank go by what it knows after a recovery, although they may know different versions to be complete."""

    tiers_kind: ClassVar[type[FallbackTiers]] = _KeepsNothing


class _DiscardsNothing(SnapshotSlots[SavedSlot]):
    def newer_than(self, version: int) -> list[SavedSlot]:  # noqa: ARG002
        return []


class _KeepsWhatIsUndone(FallbackTiers):
    slots_kind: ClassVar[type[SnapshotSlots[SavedSlot]]] = _DiscardsNothing


class KeepsWhatIsUndone(SimulatedWorker):
    """A snapshot of a version that was undone lies beside those of the same version that came after."""

    tiers_kind: ClassVar[type[FallbackTiers]] = _KeepsWhatIsUndone


class _MixesHistories(FallbackTiers):
    mixes_histories: ClassVar[bool] = True


class MixesHistoriesOnDisk(SimulatedWorker):
    """A defect of an earlier version: pieces of a checkpoint that was left incomplete counted for the same step of a
    later history.
    """

    tiers_kind: ClassVar[type[FallbackTiers]] = _MixesHistories


# --- pre-images ---------------------------------------------------------------------------------------------------
def _drop_undo(worker: SimulatedWorker) -> None:
    worker.undo = None


class AbsorbsAfterTheFirstWrite(SimulatedWorker):
    """A defect of an earlier version: an interruption after the first of two writes was absorbed as if nothing was
    written. The step was repeated, and that update was applied twice.
    """

    points: ClassVar[Mapping[str, Continue]] = {**_POINTS, "OUTSIDE": _then(_POINTS["OUTSIDE"], _drop_undo)}


class TakesPreImagesTooLate(AbsorbsAfterTheFirstWrite):
    """A pre-image is taken after the first write."""

    @staticmethod
    def _take(worker: SimulatedWorker) -> None:
        if worker.undo is None and worker.point in ("FIRST_WRITE", "LAST_WRITE"):
            worker.undo = worker.state.halved()

    points: ClassVar[Mapping[str, Continue]] = {
        **AbsorbsAfterTheFirstWrite.points,
        "GRADIENT": _then(_POINTS["GRADIENT"], _take),
        "SECOND": _then(_POINTS["SECOND"], _take),
    }


class KeepsPreImagesTooLong(SimulatedWorker):
    """Pre-images outlive the commit, and the next recovery restores them over the new version."""

    @staticmethod
    def _commit(worker: SimulatedWorker, action: act.Action) -> None:
        undo = worker.undo
        _CARRY_OUTS[act.Commit](worker, action)
        worker.undo = undo

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = {**_CARRY_OUTS, act.Commit: _commit}


class ForgetsPreImagesAtASecondStop(SimulatedWorker):
    """A rank that is stopped again, before it has undone anything, takes what it holds for what it began with."""

    @staticmethod
    def _forget(worker: SimulatedWorker) -> None:
        if worker.machine.state is Stand.PARKED:
            worker.undo = None

    points: ClassVar[Mapping[str, Continue]] = {**_POINTS, "PARKED": _then(_POINTS["PARKED"], _forget)}


class FinishesByWritingAgain(SimulatedWorker):
    """A rank that finishes a step by itself applies the last write, though its barrier stood after that."""

    @staticmethod
    def _finish(worker: SimulatedWorker) -> None:
        if worker.machine.order is not None and worker.shape.is_at_end:
            worker.state = writes.applied(worker, last=True)
        writes.finish(worker)

    points: ClassVar[Mapping[str, Continue]] = {**_POINTS, "AFTER_WRITE": _finish}


class IsPreparedInsideTheLastWrite(SimulatedWorker):
    """With the barrier at the end, a rank counts as prepared once it has the last gradient: it is still writing."""

    @staticmethod
    def _prepare(worker: SimulatedWorker) -> None:
        if worker.point == "LAST_WRITE":
            worker.machine.prepared = worker.machine.version

    points: ClassVar[Mapping[str, Continue]] = {
        **_POINTS,
        "GRADIENT": _then(_POINTS["GRADIENT"], _prepare),
        "SECOND": _then(_POINTS["SECOND"], _prepare),
    }


class KeepsPrivateStateBeforeTheLastWrite(SimulatedWorker):
    """Private state is kept beside the page before the last write, and private state changes once more after it."""

    @staticmethod
    def _keep(worker: SimulatedWorker, action: act.Action) -> happened.Event | None:
        after, worker.next_private = worker.next_private, next_private(worker.private, worker.state.version)
        event = _CARRY_OUTS[act.KeepPrivate](worker, action)
        worker.next_private = after
        return event

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = {**_CARRY_OUTS, act.KeepPrivate: _keep}


# --- surprises ----------------------------------------------------------------------------------------------------
class HasItsBarrierBeforeTheFirstWrite(SimulatedWorker):
    """The barrier stands before the first of two writes, and what follows it is held to be repeatable."""

    @property
    def shape(self) -> Shape:
        shape = super().shape
        return shape if shape.is_at_end else Shape(shape.script, 0)

    @staticmethod
    def _take(worker: SimulatedWorker) -> None:
        worker.undo = worker.state

    def interrupt(self) -> None:
        if self.surprised:
            self.surprised = self.page.torn = self.machine.passed = False
        super().interrupt()

    points: ClassVar[Mapping[str, Continue]] = {**_POINTS, "OUTSIDE": _then(_POINTS["OUTSIDE"], _take)}


class KeepsWhatASurpriseMadeOld(SimulatedWorker):
    """Private state stays beside the page as of the barrier, though private state changed in what came after it."""

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = {
        **_CARRY_OUTS,
        act.KeepPrivateAnew: lambda worker, action: None,  # noqa: ARG005
    }


class GoesByItsOwnSteps(SimulatedWorker):
    """Each process learns by itself where the barrier stands: a replacement begins with it at the end, the others do
    not."""

    @property
    def shape(self) -> Shape:
        shape = super().shape
        return shape if self.page.commits else shape.at_end


class BelievesAgain(SimulatedWorker):
    """A defect of an earlier version: after a surprise the pattern of a script was learnt anew, from a few more equal
    steps. A script whose every fourth step is longer was surprised again and again.
    """

    @staticmethod
    def _forget(worker: SimulatedWorker) -> None:
        worker.learner = replace(worker.learner, differs=False)

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = _after(act.ConfirmVersion, _forget)


class ForgetsTheDifferenceInARecovery(SimulatedWorker):
    """All ranks learn anew after a recovery, and forget that steps have been seen to differ."""

    @staticmethod
    def _forget(worker: SimulatedWorker) -> None:
        worker.learner = learner()

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = _after(act.OpenGeneration, _forget)


class TellsNoRankOfADifference(SimulatedWorker):
    """A rank that knows that steps differ keeps it to itself: a replacement learns what the others do not believe."""

    @staticmethod
    def _enter(worker: SimulatedWorker, action: act.Action) -> happened.Event | None:
        known, worker.learner = worker.learner, replace(worker.learner, differs=False)
        event = _CARRY_OUTS[act.EnterBarrier](worker, action)
        worker.learner = known
        return event

    carry_outs: ClassVar[Mapping[type[act.Action], CarryOut]] = {**_CARRY_OUTS, act.EnterBarrier: _enter}
