"""One place that is carried, and what the user is told of one that cannot be."""

import functools
from dataclasses import dataclass
from typing import Any

from relight.errors import UsageError
from relight.training.carried.finding.spots.spot import Spot
from relight.training.carried.values.homes import Homes
from relight.training.state.values.kinds import kind_of
from relight.training.state.values.marks import Mark

MOST_BYTES = 32 * 2**20  # of what decides a step; half of the room for rank-private state
MOST_LOG_BYTES = 64 * 1024  # of each value that is only accumulated or shown
MOST_SHOWN_BYTES = 4 * 2**20  # the same, of tensors: the best weights so far
MOST_SEEN_BYTES = 2**20  # of each value that is known by its changes alone
MOST_MODULE_BYTES = 64 * 1024  # of a tensor of a module that was not handed over
MOST_LEAVES = 2000  # of each of these: each costs about a microsecond in every step
MOST_LOG_LEAVES = 128  # of each value that is only accumulated or shown
NEVER = object()  # no value
CHANGES = "changes from step to step"
UNSETTLED = (
    "{names}: carried by the script, changed after the block, and a rank was restored from a copy made before that. "
    "Change them inside `with step`"
)


@dataclass
class Kept:
    """One place that is carried."""

    key: str
    name: str
    where: str  # FILE:LINE that writes it
    spot: Spot
    feeds: bool
    late: bool  # written after the block
    is_left: bool = False  # each step that reads it has written it before
    is_written: bool = True  # with the private state
    whole: str = ""  # key of the place with which it is written down instead
    seen: bool = False  # known by its values alone
    was_tried: bool = False  # written down once, to see whether it can be
    noticed: int = -1  # in this step, which not every process may have compared
    has_tensors: bool = False  # as it was looked at last
    after_write: bool = False  # written after the last step of an optimizer, where the barrier may stand before that
    at_end_of_epoch: bool = False  # only between two epochs is it written after the block, or after that step
    late_at_end: bool = False  # only between two epochs is it written after the block
    is_of_data: bool = False  # the data goes back by itself, or stays where it was read: nothing undoes it here
    moves_on: bool = False  # only shown, and known to change after it was kept at a barrier
    mark: Any = None  # when the step under way was asked for
    looked: Any = None  # when it was last looked at
    kept: Any = NEVER  # when the private state was kept last
    is_put_in: bool = False  # since then, as another process had it, or this one in an older version
    grows: bool = False  # of lists in it only the end changes
    is_only_added_to: bool = False  # nothing in the steps reaches what was added before
    lasting: Any = None  # as it was written down then, if that stands for as long as `kept` shows no change

    @property
    def only_grows(self) -> bool:
        """True if it is only shown, and lists in it only get more members."""
        return self.grows and not self.feeds

    @functools.cached_property
    def is_of_a_call(self) -> bool:
        """True if it belongs to an object that a function gets which the loop calls anew in each turn."""
        return self.key.startswith("held")

    def may_change(self, *, early: bool, ends_epoch: bool) -> bool:
        """True if it may change after the barrier: in the rest of the block (`early`), or between epochs."""
        return ends_epoch or not (self.at_end_of_epoch or (self.late_at_end and not early))

    def may_move_on(self, *, early: bool) -> bool:
        """True if it may change after it was kept at a barrier, `early` if that stands before the end of the block."""
        return (self.after_write and early) or (not self.feeds and (self.moves_on or self.late))

    @property
    def shown(self) -> str:
        """For messages: `NAME (FILE:LINE)`."""
        return f"{self.name} ({self.where})" if self.where else self.name

    @property
    def decides(self) -> bool:
        """True if a later step may be another one without it."""
        return self.feeds and not self.is_left

    def write_down_with(self, part: "Kept") -> None:
        """Write a part of this one down with all that this place holds: it decides, and moves on, as its parts do."""
        part.is_written, part.whole = False, self.key
        self.feeds |= part.feeds
        self.late |= part.late
        self.after_write |= part.after_write
        self.at_end_of_epoch &= part.at_end_of_epoch
        self.late_at_end &= part.late_at_end
        self.is_left &= part.is_left

    def is_late(self, value: Any, homes: Homes) -> bool:
        """Return whether its value is an object of the script's that a step has made where there was none."""
        is_new = kind_of(value) == "object" and homes.name_of(value) is None
        return is_new and not (isinstance(self.mark, Mark) and self.mark.kind == "object")

    def refusal(self, why: str) -> UsageError:
        """The error for a name that decides what a step computes, and cannot be carried."""
        return UsageError(
            f"{self.where or 'training.carry()'}: {self.name} goes on from step to step, and a replacement cannot get "
            f"it: {why}. Carry tensors, numbers and small containers of them; hand over an object with state_dict() "
            f"and load_state_dict() (relight.Training(..., per_rank={{...}})); or, if no step depends on it, "
            f"training.carry(ignore=({self.name!r},))"
        )

    def left_out(self, why: str) -> str:
        """The notice for a name that is not carried while the job goes on."""
        text = CHANGES if self.feeds else "is only accumulated or shown"
        if self.has_tensors and not self.feeds:
            return (
                f"{self.shown} {text}, and a replacement begins without it: {why}. If code after the loop needs it, "
                f"training.carry({self.name!r}) carries up to {MOST_BYTES >> 20} MiB in every step; larger weights "
                'belong into a module that is handed over (relight.Training(model={"model": model, "best": best})), '
                f"set inside the block. training.carry(ignore=({self.name!r},)) says that this is as it should be"
            )
        if self.decides:
            return (
                f"{self.shown} {text}, and a replacement begins without it: {why}. The job goes on; after a failure "
                "the bits are not known. Carry tensors, numbers and small containers of them, or hand over an object "
                "with state_dict() and load_state_dict() (relight.Training(..., per_rank={...})); "
                f"training.carry(ignore=({self.name!r},)) says that no step depends on it"
            )
        return (
            f"{self.shown} {text}, and a replacement begins without it: {why}. step.report(...) and "
            f"training.log_to(...) show values that survive; training.carry(ignore=({self.name!r},)) says that this is "
            "as it should be"
        )
