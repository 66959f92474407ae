"""Other workers: the model of the worker is changed, where the real one could be wrong."""

from typing import ClassVar

from relight.core.commands import Release, Restore, Stop, WorkerCommand
from relight.core.events import Event, Saved
from relight.sim.model.fallback_tiers import FallbackTiers
from relight.sim.model.worker import Worker


class DoesNotClaimPrivateState(Worker):
    """Once ours: a replacement that died in its first step left a page that named no private state."""

    claims_private: ClassVar[bool] = False


class KeepsPrivateStateTooLate(Worker):
    """Behind the barrier: who dies between the two leaves peers that are ahead of its private state."""

    keeps_private_before_barrier: ClassVar[bool] = False


class StopsInsideTheWrite(Worker):
    """A12: Stop interrupts the optimizer, and every survivor is torn."""

    finishes_writes: ClassVar[bool] = False


class HasNoBarrier(Worker):
    """A20: nothing between the gradient's all-reduce and the write."""

    has_barrier: ClassVar[bool] = False


class ComparesInTheBarrier(Worker):
    """Once ours: ranks were prepared before their states were compared. Whoever had not heard the result, since another
    rank died or only the corrupted one said it, finished the step with a gradient from a wrong state.
    """

    def _compare(self) -> None:
        self.page.keep_private(self.state.version + 1, self.next_private)
        self.page.prepared = self.prepared = self.state.version
        super()._compare()


class RestoresInPlace(Worker):
    """A copy counts as a replica from its first byte on."""

    restores_in_place: ClassVar[bool] = True


class PublishesEarly(Worker):
    """Engines answer with a version as soon as rank 0 has its gradient: one step early."""

    confirms_early: ClassVar[bool] = True


class PublishesItsOwnStep(Worker):
    """Engines answer with a version as soon as rank 0 has finished it, while others may still write."""

    def _publish(self) -> None:
        super()._publish()
        self._confirm(self.state.version)


class AnswersStopAtOnce(Worker):
    """The thread that hears Stop answers it, and the main thread is still inside the write."""

    def receive(self, message: WorkerCommand) -> None:
        before = self.newest
        super().receive(message)
        if isinstance(message, Stop) and self.newest > before and self.point in ("OPTIMIZER", "AFTER_WRITE"):
            point, self.stop_seen = self.point, self.newest
            self._stand_still()
            self.standing_in = 0
            self._go_to(point)


class ObeysOldOrders(Worker):
    """Restore and Resume are obeyed whatever generation they are of."""

    def _has(self, kind: type, generation: int) -> bool:
        return kind in self.orders or super()._has(kind, generation)


class MeetsWithoutGeneration(Worker):
    """D1: the generation is missing from the keys of the rendezvous."""

    def _begin_forming(self, generation: int) -> None:
        first = min(self.world.meetings, default=generation)  # type: ignore[attr-defined]
        super()._begin_forming(first if self.newest <= generation else generation)

    def _is_formed(self, generation: int) -> bool:  # noqa: ARG002
        return super()._is_formed(self.meeting_generation)


class ForgetsItsPreparation(Worker):
    """A survivor reports its version, and not that it could finish the step."""

    def _stand_still(self) -> None:
        prepared, self.prepared = self.prepared, -1
        super()._stand_still()
        self.prepared = prepared


class RepeatsWithAnotherBatch(Worker):
    """A repeated step draws the next batch, and the private state that belongs to it."""

    def _recover(self, *, torn: bool = False) -> None:
        if self.point in ("FORWARD", "GRADIENT"):
            self.private = hash((9, self.private))
        super()._recover(torn=torn)


class WaitsForBeginOnly(Worker):
    """Once ours: a rank whose Begin was lost with its agent did not hear Stop either."""

    def _can_go(self) -> bool:
        if self.point == "ENTERED" and self.closed:
            return False
        return super()._can_go()


class LeavesAlone(Worker):
    """Done is done: after its last step a rank leaves without waiting for the others."""

    def _finish(self) -> None:
        super()._finish()
        self.orders.setdefault(Release, Restore)
        self.poke()


class _OnlySlot(FallbackTiers):
    overwrites_the_only_one: ClassVar[bool] = True


class OverwritesTheOnlySnapshot(Worker):
    """The next snapshot goes over the last one that is complete everywhere."""

    tiers_kind: ClassVar[type[FallbackTiers]] = _OnlySlot


class _TakesKeptForEstablished(FallbackTiers):
    takes_kept_for_established: ClassVar[bool] = True


class TakesKeptForEstablished(Worker):
    """Once ours: buddies had changed, and the version that all had gone back to counted as established, though the new
    ones had yet to fetch it. What an earlier buddy had, the only copy, was overwritten."""

    tiers_kind: ClassVar[type[FallbackTiers]] = _TakesKeptForEstablished


class _KeepsNothing(FallbackTiers):
    forgets_what_to_keep: ClassVar[bool] = True


class ForgetsWhatToKeep(Worker):
    """After a recovery, in which ranks may know different versions to be complete, each goes by what it knows."""

    tiers_kind: ClassVar[type[FallbackTiers]] = _KeepsNothing


class SaysOnceThatItHasSaved(Worker):
    """Once ours: that the last checkpoint is complete was lost with an agent, and nobody said it again."""

    def _report(self, event: Event) -> None:
        if isinstance(event, Saved):
            self.world.send(self, event)
        else:
            super()._report(event)


class _KeepsWhatIsUndone(FallbackTiers):
    keeps_what_is_undone: ClassVar[bool] = True


class KeepsWhatIsUndone(Worker):
    """A snapshot of a version that was undone lies beside those of the same version that came after."""

    tiers_kind: ClassVar[type[FallbackTiers]] = _KeepsWhatIsUndone


class _MixesHistories(FallbackTiers):
    mixes_histories: ClassVar[bool] = True


class MixesHistoriesOnDisk(Worker):
    """Once ours: pieces of a checkpoint that was left incomplete counted for the same step of a later history."""

    tiers_kind: ClassVar[type[FallbackTiers]] = _MixesHistories
