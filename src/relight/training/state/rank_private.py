"""The state that belongs to one rank alone: buffers that forward changes, `per_rank` objects, attributes, numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from relight.training.state.handed import objects
from relight.training.state.handed.handed import Handed
from relight.training.state.modules.attributes import AttributeLog
from relight.training.state.modules.averages import Averages
from relight.training.state.modules.slots import Key, Slots
from relight.training.state.optimizers.optimizer_tree import own_numbers
from relight.training.state.optimizers.parameter_groups import parameters_of
from relight.training.state.rank_attributes import RankAttributes
from relight.training.torch_private.distributed.zero import state_of


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
        self._paths: dict[Key, str] = {}  # of these, in order, as they were written down last
        self.with_own_numbers: set[str] = set()  # optimizers that keep numbers which differ between ranks

    def tree(self) -> dict[str, Any]:
        """Return it as a tree, for `adopt` on the rank's replacement."""
        if self._paths.keys() != self.buffers:
            self._paths = {(owner, name): f"{owner}/{name}" for owner, name in sorted(self.buffers)}
        tree = {
            "buffers": dict(zip(self._paths.values(), map(self._slots.get, self._paths), strict=True)),
            "per_rank": objects.trees_of(self._handed.per_rank, self._handed),
        }
        if counts := self._averages.counts(self.buffers):
            tree["averages"] = counts
        if self.with_own_numbers:
            tree["numbers"] = self.own_numbers()
        if self._attributes.has_state:
            tree["attributes"] = self._attributes.private()
        return tree

    def adopt(self, tree: dict[str, Any]) -> None:
        """Take on `tree`, made on this rank before the write that completed the version. The replica comes first."""
        with torch.no_grad():
            for path, tensor in tree["buffers"].items():
                owner, name = path.split("/", 1)
                self._slots.set((owner, name), tensor)
            self._averages.repeat(tree.get("averages", {}), self.buffers)
        objects.load(self._handed.per_rank, tree["per_rank"], self._handed)
        for name, numbers in tree.get("numbers", {}).items():
            self.with_own_numbers.add(name)
            parameters = parameters_of(self._handed.optimizers[name])
            for index, own in numbers.items():
                state_of(self._handed.optimizers[name])[parameters[index]].update(own)
        self._rank_attributes.take_over(tree.get("attributes", {}))

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

    # --- names of the buffers, in a copy of the replica -----------------------------------------------------------
    def named_buffers(self) -> list[list[str]]:
        """Return module and name of each buffer, with a third word where an average took it over from its model."""
        copied = self._averages.copied
        return [[*key, "copied"] if key in copied else [*key] for key in sorted(self.buffers)]

    def adopt_names(self, named: list[list[str]]) -> None:
        """Take on the names that `named_buffers` returned where a copy of the replica was made."""
        self.buffers = {(owner, name) for owner, name, *_ in named}
        self._averages.copied = {(owner, name) for owner, name, *copied in named if copied}

    # --- whether there is any ---------------------------------------------------------------------------------------
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
