"""The state that belongs to one rank alone: buffers that forward changes, `per_rank` objects, attributes, numbers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from relight.errors import UsageError
from relight.training.state.handed import objects
from relight.training.state.handed.handed import Handed
from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.modules.averages import Averages
from relight.training.state.modules.slots import Key, Slots
from relight.training.state.optimizers.optimizer_tree import own_numbers
from relight.training.state.optimizers.parameter_groups import parameters_of
from relight.training.state.rank_attributes import LateChanges, RankAttributes
from relight.training.torch_private.distributed.zero import state_of
from relight.transfer.io.codec import encode_tree

_LOOKS, _LOOKS_EVERY = 3, 64  # at what code between steps writes: the first times, and then now and then
_NAMED = 3  # tensors in a message
_PLACES = 4096  # in a row of numbers that says which buffers a rank has for itself
_MOVED = (
    "{names}: each rank has its own, changed after the block, and a rank was restored from a copy made before that. "
    "Change it inside `with step`"
)

_MISSED = (
    "{names}: changed for the first time by the last step before this, and not on this rank, which has what the "
    "script made"
)


class RankPrivate:
    """The rank-private state, except for the data position and random streams."""

    def __init__(
        self,
        handed: Handed,
        slots: Slots,
        attributes: AttributeLog,
        rank_attributes: RankAttributes,
        averages: Averages,
    ) -> None:
        self._handed = handed
        self._slots = slots
        self._attributes, self._rank_attributes = attributes, rank_attributes
        self._averages = averages
        self.buffers: set[Key] = set()  # known to change in forward
        self._written: set[Key] = set()  # buffers that operations of steps were seen to write
        self._agreed: set[Key] = set()  # those of `buffers` that all ranks know to be such
        self._before: tuple[set[Key], set[Key]] = set(), set()  # `buffers`, and those, when the step began
        self._looked: tuple[Any, bool] = (set(), set(), set()), False  # for new ones: at what, and the answer
        self._paths: dict[Key, str] = {}  # of these, in order, as they were written down last
        self.with_own_numbers: set[str] = set()  # optimizers that keep numbers which differ between ranks
        self.late_changes = LateChanges()
        self._objects: dict[str, bytes] = {}  # the state of each, as it was kept last
        self._shared: list[Key] = []  # tensors that ranks share, changed by the newest code between two steps
        self._times_shared = 0  # how often such code changed any

    def tree(self) -> dict[str, Any]:
        """Return it as a tree, for `adopt` on the rank's replacement."""
        if self._paths.keys() != self.buffers:
            self._paths = {(owner, name): f"{owner}/{name}" for owner, name in sorted(self.buffers)}
        tree: dict[str, Any] = {
            "buffers": dict(zip(self._paths.values(), map(self._slots.get, self._paths), strict=True)),
            "per_rank": self._keep_objects(),
        }
        if counts := self._averages.counts(self.buffers):
            tree["averages"] = counts
        if self.with_own_numbers:
            tree["numbers"] = self.own_numbers()
        if self._attributes.has_state:
            tree["attributes"] = self._attributes.private()
            tree["guessed"] = self._rank_attributes.is_a_guess  # so is what a replacement has of this rank
        return tree

    def adopt(self, tree: dict[str, Any], late: bytes = b"") -> None:
        """Take on `tree`, made on this rank before the write that completed the version. The replica comes first.

        `late`: what code has changed since then in the objects of another rank, by `late_objects`. None is left
        out if this rank had kept it again after that code.
        """
        with torch.no_grad():
            for path, tensor in tree["buffers"].items():
                owner, name = path.split("/", 1)
                self._slots.set((owner, name), tensor)
            self._averages.repeat(tree.get("averages", {}), self.buffers)
        own = tree["per_rank"] if tree.get("late") is None else objects.with_changes(tree["per_rank"], late)
        objects.load(self._handed.per_rank, own, self._handed)
        self._keep_objects()
        for name, numbers in tree.get("numbers", {}).items():
            self.with_own_numbers.add(name)
            parameters = parameters_of(self._handed.optimizers[name])
            for index, own in numbers.items():
                state_of(self._handed.optimizers[name])[parameters[index]].update(own)
        guessed, is_late = tree.get("guessed", False), tree.get("late") is not None
        self._rank_attributes.take_over(tree.get("attributes", {}), guessed=guessed, is_late=is_late)

    @contextmanager
    def including(self, buffers: set[Key], *, numbers: bool) -> Iterator[None]:
        """Count these buffers, and `numbers` of all optimizers, as the rank's own inside the block."""
        known = self.buffers, self.with_own_numbers
        self.buffers = self.buffers | buffers
        if numbers:
            self.with_own_numbers = set(self._handed.optimizers)
        try:
            yield
        finally:
            self.buffers, self.with_own_numbers = known

    def late_objects(self, kept: Mapping[str, Any]) -> bytes:
        """Return what code has changed in the objects since they were `kept` at the barrier, for `adopt` elsewhere."""
        return objects.changes(kept, self._handed.per_rank, self._handed)

    def _keep_objects(self) -> dict[str, Any]:
        trees = objects.trees_of(self._handed.per_rank, self._handed)
        self._objects = {name: encode_tree(tree, name) for name, tree in trees.items()}
        return trees

    def begin(self) -> None:
        """A step begins: remember what is known of buffers."""
        self._before = set(self.buffers), self._agreed & self.buffers

    def roll_back(self) -> None:
        """The step under way is undone: what was kept at its barrier is not that of the newest step.

        Nor is what it has shown of buffers: for the version gone back to, no rank has kept other ones.
        """
        self._rank_attributes.roll_back()
        self._keep_objects()
        self.buffers, self._agreed = set(self._before[0]), set(self._before[1])

    # --- code between two steps -----------------------------------------------------------------------------------
    def see_code(self, version: int, changed: Iterable[Key]) -> bool:
        """The loop asks for step `version`, and code before it changed these tensors.

        Returns whether it changed anything that is the rank's own, so that it is to be kept again.
        """
        own = self.buffers.intersection(changed)
        self._shared = sorted(key for key in changed if key not in own)
        self._times_shared += bool(self._shared)
        if own:
            own -= self._averages.repeated()
        names = [f"buffer {name} of {owner}" for owner, name in own]
        if self._objects:
            trees = objects.trees_of(self._handed.per_rank, self._handed)
            names += [name for name, tree in trees.items() if encode_tree(tree, name) != self._objects[name]]
        self.late_changes.see(version, names)
        of_attributes = self._rank_attributes.see_code(version)
        return of_attributes or bool(self.late_changes.newest)

    def number(self) -> int:
        """Return the number that stands for the other tensors which such code wrote; 0: none.

        Now and then, as looking at all bits takes time, also for what is in them. Where ranks have other numbers, the
        states are compared: an evaluation on one rank may have put its weights back.
        """
        if not self._shared:
            return 0
        times = self._times_shared
        looks = not self._handed.is_divided and (times <= _LOOKS or times % _LOOKS_EVERY == 0)
        tree = {f"{owner}/{name}": self._slots.get((owner, name)) if looks else None for owner, name in self._shared}
        return xxhash.xxh3_64_intdigest(encode_tree(tree, "tensors")) >> 20 | 1

    def refusal(self) -> UsageError:
        """Return the error for such tensors that differ from rank to rank."""
        return UsageError(
            f"{_listed(self._shared) or 'a tensor'} changed after `with step`, and not alike on all ranks: have all of "
            "them make the same change (random numbers from a generator with one seed), or make it inside the block "
            "and share it (broadcast)"
        )

    def describe_code(self) -> dict[str, Any]:
        """Return what a copy of the state says of code between steps."""
        return {"late_changes": self.late_changes.describe(), "times": self._times_shared}

    def adopt_code(self, described: Mapping[str, Any]) -> None:
        """Take on what `describe_code` returned where the state was copied."""
        self.late_changes.adopt(described["late_changes"])
        self._times_shared = described["times"]

    @property
    def late(self) -> list[list[str]]:
        """Names of state that such code has changed so far, for the process that replaces this one: see `lost`."""
        return [self.late_changes.all, self._rank_attributes.late_changes.all]

    def lost(self, late: Sequence[Sequence[str]] | None) -> list[str]:
        """Return why equal bits cannot be vouched for, if code after a lost rank's last block changed what it had.

        `late`: as it was there before its last barrier; None: all was kept again after that code.
        """
        own, of_attributes = late or (None, None)
        names = self.late_changes.lost(own)
        found = _MOVED.format(names=", ".join(names)) if names else None
        return [*filter(None, (found, self._rank_attributes.lost(of_attributes)))]

    # --- buffers that each rank has for itself: the same on all ranks -----------------------------------------------
    @property
    def has_new_buffers(self) -> bool:
        """True if steps were seen to write some of which other ranks may not know."""
        known = self.buffers, self._written, self._agreed
        if self._looked[0] != known:
            self._looked = tuple(map(set, known)), not self._seen_written() <= self._agreed
        return self._looked[1]

    def see_written(self, keys: Iterable[Key]) -> None:
        """Operations of a step wrote these buffers: no bit of them has flipped."""
        if new := set(keys) - self._written:
            self._written |= new

    def _seen_written(self) -> set[Key]:
        """Return those of modules of which a buffer was seen to be written: BatchNorm hides that of its statistics."""
        modules = {_module_of(key) for key in self._written}
        return {key for key in self.buffers if _module_of(key) in modules}

    def row_of_buffers(self) -> list[int]:
        """Return numbers that say which they are, to be summed up over ranks."""
        row = [0] * _PLACES
        for key in self._seen_written():
            row[_place_of(key)] = 1
        return row

    def in_sums(self, sums: Sequence[int]) -> set[Key]:
        """Return those of any rank, by these sums of rows: some change by chance, on one rank before another."""
        return {key for key in self._slots.buffers if sums[_place_of(key)]}

    def agree(self, found: set[Key]) -> None:
        """Take on those of any rank."""
        self.buffers |= found
        self._written |= found
        self._agreed |= found

    def include_averages(self) -> None:
        """Buffers have become the rank's own: those of averages of them are so, too."""
        if self._averages:
            self.buffers |= self._averages.like(self.buffers)
            self._averages.prepare(self.buffers)

    def missed(self, tree: Mapping[str, Any]) -> str | None:
        """Return why equal bits cannot be vouched for, if a lost rank had not kept some of them in its `tree`."""
        missing = sorted(key for key in self.buffers if "/".join(key) not in tree["buffers"])
        return _MISSED.format(names=_listed(missing)) if missing else None

    # --- names of the buffers, in a copy of the replica -----------------------------------------------------------
    def named_buffers(self) -> list[list[str]]:
        """Return module and name of each buffer, with a third word where an average took it over from its model."""
        copied = self._averages.copied
        return [[*key, "copied"] if key in copied else [*key] for key in sorted(self.buffers)]

    def adopt_names(self, named: list[list[str]]) -> None:
        """Take on the names that `named_buffers` returned where a copy of the replica was made."""
        self.buffers = {(owner, name) for owner, name, *_ in named}
        self._agreed = set(self.buffers)
        self._averages.copied = {(owner, name) for owner, name, *copied in named if copied}

    # --- whether there is any ---------------------------------------------------------------------------------------
    @property
    def has_objects(self) -> bool:
        """True if the script has handed over objects that differ between ranks."""
        return bool(self._handed.per_rank)

    @property
    def exists(self) -> bool:
        """True if this rank has anything that other ranks do not have."""
        return bool(self.buffers or self._handed.per_rank or self.with_own_numbers or self._attributes.has_state)

    @property
    def follows_from_rank(self) -> bool:
        """True if another rank could derive all of it."""
        own = self.buffers or self._handed.per_rank or self.with_own_numbers
        return not own and not (self._attributes.has_state and self._rank_attributes.differ)

    def see_own_numbers(self) -> None:
        """Find, after the first writes, the optimizers that keep numbers which differ between ranks."""
        found = {name for name, optimizer in self._handed.optimizers.items() if own_numbers(optimizer)}
        self.with_own_numbers |= found

    def own_numbers(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return these numbers, by optimizer and number of the parameter."""
        return {name: own_numbers(self._handed.optimizers[name]) for name in sorted(self.with_own_numbers)}


def _module_of(key: Key) -> tuple[str, str]:
    owner, name = key
    return owner, name.rpartition(".")[0]


def _place_of(key: Key) -> int:
    return xxhash.xxh3_64_intdigest("/".join(key).encode()) % _PLACES


def _listed(keys: Sequence[Key]) -> str:
    named = ", ".join(f"{name} of {owner}" for owner, name in keys[:_NAMED])
    return named if len(keys) <= _NAMED else f"{named} and {len(keys) - _NAMED} more"
