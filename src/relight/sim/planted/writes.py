"""Other workers, for steps of several writes: what is undone, what is not, and when."""

from typing import ClassVar

from relight.core.commands import Restore, Save
from relight.sim.model.contents import next_private
from relight.sim.model.shapes import Shape
from relight.sim.model.worker import Worker


class AbsorbsAfterTheFirstWrite(Worker):
    """Once ours: an interruption after the first of two writes was absorbed as if nothing was written. The step was
    repeated, and that update was applied twice."""

    def _take_pre_images(self) -> None:
        self.undo = None


class KeepsWhatThePreparedWrote(Worker):
    """A rank that was prepared and is sent back keeps what it wrote."""

    def _on_parked(self) -> None:
        was_prepared = self.prepared == self.state.version
        super()._on_parked()
        if was_prepared and self.point == "OBEY":
            self.undo = None


class TakesPreImagesTooLate(Worker):
    """A pre-image is taken after the first write."""

    def _take_pre_images(self) -> None:
        self.undo = None

    def _write_undoably(self) -> None:
        super()._write_undoably()
        if self.undo is None:
            self.undo = self.state.halved()


class KeepsPreImagesTooLong(Worker):
    """Pre-images outlive the commit, and the next recovery restores them over the new version."""

    def _keep_what_was_written(self) -> None:
        self.surprised = False


class RollsBackBeforeTheDecision(Worker):
    """A prepared rank undoes its writes as soon as it stands still; should it go forward, it commits the old state."""

    def _stand_still(self) -> None:
        self._roll_back()
        super()._stand_still()


class ForgetsPreImagesAtASecondStop(Worker):
    """A rank that is told to stop again, before it has undone anything, takes what it holds for what it began with."""

    def _on_parked(self) -> None:
        is_told_again = not (self._has(Restore, self.stop_seen) or self._has(Save, self.stop_seen))
        super()._on_parked()
        if is_told_again:
            self.undo = None


class OffersBeforeItRollsBack(Worker):
    """A source serves its state first and undoes its writes then."""

    def _obey(self) -> None:
        undo, self.undo = self.undo, None
        super()._obey()
        self.undo = undo
        self._roll_back()


class SavesWhatWasWritten(Worker):
    """The last checkpoint is written without undoing what the interrupted step has written."""

    def _obey(self) -> None:
        if isinstance(self.restore, Save):
            self.undo = None
        super()._obey()


class FinishesByWritingAgain(Worker):
    """A rank that finishes a step by itself applies the last write, though its barrier stood after that."""

    def _commit(self) -> None:
        if self.restore is not None and self.shape.is_at_end:
            self.state = self._applied(last=True)
        super()._commit()


class IsPreparedInsideTheLastWrite(Worker):
    """With the barrier at the end, a rank counts as prepared once it has the last gradient: it is still writing."""

    def _write_undoably(self) -> None:
        super()._write_undoably()
        if self.point == "LAST_WRITE":
            self.prepared = self.state.version


class CountsAReplacementAsPrepared(Worker):
    """A replacement takes over that its predecessor was prepared, with the state from before the step."""

    def _take_over(self) -> None:
        super()._take_over()
        if self.point == "ROLLBACK" and self.shape.is_at_end:
            self.prepared = self.state.version


class KeepsPrivateStateBeforeTheLastWrite(Worker):
    """What is kept beside the page is from before the last write, and private state changes once more after it."""

    def _on_kept(self) -> None:
        after, self.next_private = self.next_private, next_private(self.private, self.state.version)
        super()._on_kept()
        self.next_private = after


class HasItsBarrierBeforeTheFirstWrite(Worker):
    """The barrier stands before the first of two writes, and what follows it is held to be repeatable."""

    @property
    def shape(self) -> Shape:
        shape = super().shape
        return shape if shape.is_at_end else Shape(shape.script, 0, has_second_barrier=False)

    def _take_pre_images(self) -> None:
        self.undo = self.state

    def _recover(self, *, torn: bool = False) -> None:
        if self.surprised:
            self.surprised = self.page.torn = False
        super()._recover(torn=torn)

    def _on_extra_written(self) -> None:
        self._change_private_late()
        self.page.keep_private(self.state.version + 1, self.next_private)
        self._go_to("AFTER_WRITE")


class TakesASurpriseForIntact(Worker):
    """A rank that is interrupted in what came after the barrier, against what was learnt, says that it is intact."""

    def _recover(self, *, torn: bool = False) -> None:
        if self.surprised:
            self.surprised = self.page.torn = False
        super()._recover(torn=torn)


class IsCalledBlankOnceItCopies(Worker):
    """A torn rank reports that it is blank once it has begun to copy: then nobody looks for its private state, which it
    has beside its own page."""

    def _copy(self, restore: Restore) -> None:
        self.blank = True
        super()._copy(restore)


class HasNoSecondBarrier(Worker):
    """A step that turns out to be longer than was learnt is committed by each rank alone."""

    def _on_extra_written(self) -> None:
        self._change_private_late()
        self.page.keep_private(self.state.version + 1, self.next_private)
        self._go_to("AFTER_WRITE")


class KeepsWhatASurpriseMadeOld(Worker):
    """What was kept beside the page at the barrier stays, though private state changed in what came after it."""

    keeps_private_anew: ClassVar[bool] = False


class GoesByItsOwnSteps(Worker):
    """Each process learns by itself where the barrier stands: a replacement begins with it at the end, the others do
    not."""

    @property
    def shape(self) -> Shape:
        shape = super().shape
        return shape if self.page.commits else shape.at_end
