"""State that a script carries from step to step by itself: found, kept with the rank-private state, and put back.

What is carried is found in the code of the loop before the first step, and by values in the first steps. The value that
belongs to a version is the one with which the loop asks for its step: code above `with step` runs in every attempt, and
in a replacement.
"""

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from relight.training.carried.adoption import Adoption
from relight.training.carried.doubts import Doubts
from relight.training.carried.finding.catalog import Catalog
from relight.training.carried.finding.search import Search
from relight.training.carried.finding.spots.spot import is_empty
from relight.training.carried.late_values import taken, taken_in_part
from relight.training.carried.rank_values import RankValues
from relight.training.carried.succession import Keeper
from relight.training.carried.undo import Undo
from relight.training.carried.values.parts import Parts
from relight.training.state.values.marks import changed

SINCE = "the loop began"  # among facts about places: nanoseconds since 1970
_MISSED = (
    "{names}: carried by the script from its first step on, and that step was interrupted. Put `with step` into the "
    "function that has the loop"
)
_LOST_LAST = "{names}: set by the last step and used after the loop, and a rank was lost after its last step"


class Carried:
    """Owned by the main thread. `turn`, `compare` and `remember` begin a step; `commit` or `roll_back` ends it."""

    def __init__(
        self,
        is_foreign: Callable[[Any], bool],
        say: Callable[[str, str], None],
        *,
        is_id: Callable[[int], bool] = lambda _: False,
        is_of_data: Callable[[Any], bool] = lambda _: False,
        parts: Parts | None = None,
        data: Any = None,
    ) -> None:
        """Nothing is carried until the loop is found.

        Args:
            is_foreign: of an object whose attributes are kept otherwise: what was handed over, and relight's own.
            say: tells the user something once, by a key.
            is_id: of a number that is the `id` of a tensor handed over.
            is_of_data: of an object that dataset, sampler or `collate_fn` holds, or is.
            parts: names of what was handed over, so that it can be carried which of it a variable stands for.
            data: the loader or function that was handed over.
        """
        self._catalog = Catalog(is_foreign, say, is_of_data, parts)
        self._search = Search(self._catalog)
        self._kept = self._catalog.kept
        self._loop = self._catalog.loop
        self._spots = self._loop.spots
        self.show_epochs, self.set_epoch = self._loop.show_epochs, self._loop.set_epoch
        self._spots.data = data
        self.show, self.look_into, self.made_in = self._spots.show, self._spots.look_into, self._search.made_in
        self._undo = Undo(self._catalog)
        self.doubts = Doubts(self._catalog)
        self.keeper = Keeper(self._catalog, is_id)
        self.moved, self.ends_epoch = self.keeper.moved, self._loop.ends_epoch
        self._adoption = Adoption(self._catalog, self.keeper.ends)
        self.rank_values = RankValues(self._catalog)
        self._missed = False  # the first values are those at the entry of the first step
        self._in_step = False
        self.is_undone = False  # the last step was rolled back, and the loop has not asked for it again
        self._looks = 0

    def declare(self, *things: Any, ignore: Sequence[str] = ()) -> None:
        """Carry these too: names as strings, as the loop's function sees them (`"h"`, `"self.mean"`), or objects."""
        self._search.declare(things, ignore)

    @property
    def may_leave(self) -> bool:
        """True if the script may leave its loop early, as far as its code is known."""
        return self._loop.may_leave

    # --- a step ------------------------------------------------------------------------------------------------
    def turn(self, frame: FrameType) -> str | None:
        """The loop asks for a step, from a frame that called this one.

        Returns why equal bits cannot be vouched for. Raises UsageError for what is carried and cannot be kept.
        """
        if not self._loop.is_found:
            self._loop.ask(frame)
            if (ahead := self._loop.ahead) is not None:
                self._search.find(*ahead)
            else:
                if self._adoption.is_pending:
                    self._adoption.look_for_loop(frame)
                    self._put_in()
                return None
        if self._catalog.is_idle and not self._adoption.is_pending and not self.rank_values.is_pending:
            return None
        self._loop.look_at(frame)
        doubt, was_undone = None, self.is_undone
        if self.is_undone:
            self._undo.put_back(self._kept.values())  # code between steps came after a step that does not count
            missed = self._missed and not self._adoption.is_pending and self._loop.computes_above
            if missed and self.decides and not self._spots.shown:  # an integration's loop has nothing above its block
                doubt = _MISSED.format(names=", ".join(self.names))
            self.is_undone = False
        if self._adoption.is_pending:
            self._put_in()
        if self.rank_values.is_pending:
            doubt = self.rank_values.put_in() or doubt
        late = self._catalog.notice(between=True)
        if was_undone:
            self._undo.put_back(late)  # changed after the block, by code that relight does not see
        self.doubts.turn(late if not was_undone else ())
        return doubt or self._spots.settings.files.doubt_of_undone() or None

    def enter(self, frame: FrameType, number: int) -> str | None:
        """`with step` in this frame: the first one shows the loop, if its head did not. Returns what `turn` does."""
        if self._loop.is_found:
            if self._loop.computes_above and not self._catalog.is_idle:
                self._undo.enter_block()
            return None
        self._search.find(frame)
        self._missed = True
        if self._adoption.is_pending:
            self._put_in()
        doubt = self.rank_values.put_in() if self.rank_values.is_pending else None
        self.compare(number)
        self.remember()
        return doubt

    def compare(self, number: int) -> None:
        """Look for changes that the code did not show, as step `number` begins; what has changed is carried."""
        if not self._loop.is_found:
            return
        self._catalog.follow_parts()
        self._catalog.begin_comparison(number)

    def remember(self, *, compared: bool = False) -> None:
        """Remember the values of now, for `roll_back`; `compared`: those that `needs_keeping` has just looked at."""
        if not self._loop.is_found:
            return
        self._in_step = True
        if not self._catalog.is_idle:
            self._undo.remember(compared=compared)
        self._spots.frames.forget()

    def commit(self) -> None:
        """The step counts."""
        self._in_step = False
        self.is_undone = self._missed = False
        self._catalog.comparison.commit()
        self.rank_values.forget_look()
        self._spots.frames.forget()

    def roll_back(self) -> str | None:
        """Put back what the step under way changed; what code changes before the next turn is put back there.

        Returns why a repetition of the step may end with other bits.
        """
        if not self._in_step:
            return None
        self._in_step, self.is_undone = False, True
        lasting = self._undo.roll_back()
        self.keeper.roll_back()
        return lasting

    def end(self, *, computed: bool) -> str | None:
        """The loop is about to end. `computed`: steps were computed in this process.

        Returns why the code after the loop does not see what it would have.
        """
        shown_after = self._catalog.shown_after
        return None if computed or not shown_after else _LOST_LAST.format(names=", ".join(sorted(shown_after)))

    def leave(self) -> None:
        """The loop has ended: no frame is held any more."""
        self._loop.leave()
        self._catalog.comparison.leave()

    def _put_in(self) -> None:
        self._missed = False
        self.doubts.note_ownerless(self._adoption.put_in())
        self._spots.frames.forget()

    # --- the private state -----------------------------------------------------------------------------------
    def capture(self, *, early: bool = False, ends_epoch: bool = True, compared: bool = False) -> Any:
        """The values now, as a tree for `encode_tree`; empty: nothing is carried.

        `early`: the block is not over. `ends_epoch`: code between two epochs may follow. `compared`: they are those
        between two steps, and were just looked at. Raises UsageError for a value that decides what a step computes
        and cannot be kept.
        """
        if not compared:
            self._spots.frames.forget()
            if self._in_step:
                self._catalog.notice(between=False, early=early)
            self._catalog.follow_parts()
        in_step = self._in_step and not compared
        tree = self.keeper.capture(in_step=in_step, early=early, ends_epoch=ends_epoch, compared=compared)
        self._spots.frames.forget()
        return tree

    @property
    def needs_keeping(self) -> bool:
        """At a turn of the loop: whether code between steps changed what was kept at the barrier, or may have."""
        self._catalog.follow_parts()
        return self.keeper.is_due()

    def noticed(self) -> dict[str, int]:
        """Return keys of values seen to change, and of the steps that showed it; -1: only shown, and moves on late.

        Under `SINCE`, when the loop of this process began.
        """
        own = {one.key: one.noticed for one in self._kept.values() if one.noticed >= 0 or one.moves_on}
        return {**own, SINCE: self._spots.settings.files.since_ns}

    def adopt(
        self, tree: dict[str, Any] | None, noticed: Mapping[str, int] | None = None, at: int = 0, late: bytes = b""
    ) -> str | None:
        """Values of another process, to be put in before step `at`. Returns why equal bits cannot be vouched for.

        `noticed`, `late`: of another rank, the latter by `late_values.offered`.
        """
        self._in_step = False
        noticed = dict(noticed or {})
        self._spots.settings.files.adopt(noticed.pop(SINCE, 0))
        doubt = self._undo.doubt({*tree["names"], *tree["of_calls"]} if tree else ())
        return self._adoption.adopt(tree, noticed, at, taken(tree, late), taken_in_part(tree, late)) or doubt

    # --- what others ask ---------------------------------------------------------------------------------------
    def look(self) -> int:
        """A number that is another one once something that decides a step has changed."""
        if self._kept:
            self._spots.frames.forget()
            for one in self._kept.values():
                if one.feeds:
                    value = one.spot.get()
                    if changed(one.looked, value):
                        one.looked = self._catalog.mark_of(value, one)
                        self._looks += 1
            self._spots.frames.forget()
        return self._looks

    @property
    def is_incomplete(self) -> bool:
        """True if a name that decides a step is set after the last write, and was not yet.

        It is empty until then, or stands for a part of the state, which is kept otherwise.
        """
        if any(one.feeds and one.after_write for one in self._catalog.unchanged_parts()):
            return True
        late = [one for one in self._kept.values() if one.feeds and one.after_write]
        if not late:
            return False
        self._spots.frames.forget()
        incomplete = any(is_empty(one.spot.get()) for one in late)
        self._spots.frames.forget()
        return incomplete

    @property
    def computes_above(self) -> bool:
        """True if code stands between the loop's head and `with step`; also if that is not known."""
        return self._loop.computes_above

    @property
    def computes_outside(self) -> bool:
        """True if the script's code may run between two steps; also if that is not known."""
        return self._loop.computes_outside

    @property
    def decides(self) -> bool:
        """True if anything that is carried, or cannot be, decides what a step computes."""
        return bool(self._catalog.lost) or any(one.feeds for one in self._kept.values())

    @property
    def names(self) -> list[str]:
        """Describe the carried variables, for messages: `NAME (FILE:LINE)`."""
        return [one.shown for one in self._kept.values()]
