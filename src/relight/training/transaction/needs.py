"""The last moment at which a step needed other ranks: by a collective, or by a change of rank-private state."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from relight.training.state.handed.schedulers import own_state_dict
from relight.training.state.modules.slots import Key
from relight.transfer.io.codec import encode_tree

if TYPE_CHECKING:
    from relight.training.state.tracked import TrackedState

_NAMED = 3  # tensors in a message


class LaunchCount(Protocol):
    """Counts the collectives of this process."""

    @property
    def launches(self) -> int:
        """The number launched so far."""

    @property
    def launches_of_all(self) -> int:
        """Count those in which every rank takes part."""


class CarriedState(Protocol):
    """State that the script carries from step to step by itself."""

    def look(self) -> int:
        """Return a number that differs once that state has changed."""

    @property
    def is_incomplete(self) -> bool:
        """True if what decides a step is still empty, and is set after the last write of some step."""


class NothingCarried:
    """A script without such state."""

    is_incomplete = False

    def look(self) -> int:
        return 0


class Streams(Protocol):
    """Random streams of the script."""

    def look(self) -> int:
        """Return a number that differs once the script has drawn from streams that run on from step to step."""


class Needs:
    """Needs of other ranks in the step under way: collectives, and changes of state that only this rank has."""

    def __init__(
        self, state: "TrackedState", collectives: LaunchCount, carried: CarriedState, streams: Streams | None
    ) -> None:
        self._state = state
        self._collectives = collectives
        self._carried = carried
        self._streams = streams
        self._seen: tuple[Any, ...] = ()  # launches and private state, at the last look
        self._launches_of_all = 0  # as an early barrier was passed
        self.stirred = 0  # of the step's writes, the number of those before its last need

    @property
    def more_expected(self) -> bool:
        """True if a later step may change state after writes that nothing followed until now."""
        return self._carried.is_incomplete

    def begin(self, now: list[int] | None) -> None:
        """A step begins. `now`: a scan of all tensors; None if its needs are known already."""
        self.stirred = 0
        if now is not None:
            self._seen = self._look(now)

    def note(self, now: list[int], writes: int) -> None:
        """Compare with the last look, after so many `writes`."""
        seen = self._look(now)
        if seen != self._seen:
            self.stirred, self._seen = writes, seen

    def pass_barrier(self, now: list[int]) -> None:
        """An early barrier is passed: no need is expected from here on."""
        self._seen = self._look(now)
        self._launches_of_all = self._collectives.launches_of_all

    @property
    def needed_all(self) -> bool:
        """True if a collective of all ranks came after an early barrier: all of them know of it."""
        return self._collectives.launches_of_all > self._launches_of_all

    def surprise(self, now: list[int], lost: Sequence[Key]) -> str:
        """Name a need that came after an early barrier; empty: none did. `lost`: averages moved by the script."""
        seen = self._look(now)
        if seen[0] != self._seen[0]:
            return "a collective"
        if seen != self._seen:
            return "a change of state that only this rank has"
        return f"an average of {listed(lost)} that the script made by itself" if lost else ""

    def _look(self, now: list[int]) -> tuple[Any, ...]:
        """Return launches, and values that differ after a change of rank-private state."""
        state, attributes = self._state, self._state.attributes
        trained = state.members.trained_owners
        places = (found for owner, found in state.slots.buffer_places.items() if owner in trained)
        own = list(map(now.__getitem__, itertools.chain.from_iterable(places)))
        drawn = self._streams.look() if self._streams is not None else 0
        seen = self._collectives.launches, own, attributes.assigned_buffers, self._carried.look(), drawn
        private = state.rank_private
        if not (state.per_rank or private.with_own_numbers or attributes.has_state):
            return seen
        kept = {name: own_state_dict(thing) for name, thing in state.per_rank.items()}
        tree = {"per_rank": kept, "attributes": attributes.private(), "numbers": private.own_numbers()}
        return *seen, xxhash.xxh3_64_intdigest(encode_tree(tree, "rank-private state"))


def listed(keys: Sequence[Key]) -> str:
    """Name the first of these tensors in a message."""
    names = ", ".join(f"{name} of {owner}" for owner, name in keys[:_NAMED])
    return names if len(keys) <= _NAMED else f"{names} and {len(keys) - _NAMED} more"
