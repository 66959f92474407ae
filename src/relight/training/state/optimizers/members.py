"""The parameters that each optimizer updates: as it was handed over, and as its groups are now."""

import operator
from typing import Any

import torch
from torch import nn

from relight.errors import UsageError
from relight.training.state.handed.handed import Handed
from relight.training.state.handed.refusals import refuse_foreign_parameters
from relight.training.state.modules.slots import Key, Slots
from relight.training.state.optimizers.parameter_groups import (
    members_of_groups,
    named,
    names_in_groups,
    parameters_of,
    regroup,
)
from relight.training.torch_private.distributed.ddp import NOT_REDUCED, unreduced
from relight.training.torch_private.distributed.zero import is_zero, state_of

Names = list[list[str]]  # of an optimizer's parameters, by group


class OptimizerMembers:
    """The parameters of each optimizer's groups. A script may add some while it trains."""

    def __init__(self, handed: Handed, slots: Slots) -> None:
        self._handed = handed
        self._slots = slots
        self._built_with = {name: self._names_of(name) for name in handed.optimizers}
        self._seen = {name: members_of_groups(optimizer) for name, optimizer in handed.optimizers.items()}
        self.joined: set[int] = set()  # by `id`, members of optimizers whose groups the step under way has changed
        self._unreduced: dict[int, str] | None = None  # names of parameters, by `id`; None: not yet looked for
        self.trained_owners = self._owners_that_train()  # modules that some optimizer updates

    def trained(self) -> list[torch.Tensor]:
        """Return the parameters that an optimizer updates; an averaged model's are not among them."""
        return [parameter for optimizer in self._handed.optimizers.values() for parameter in parameters_of(optimizer)]

    def updated(self) -> set[int]:
        """Return the `id` of each parameter that an optimizer had when it was handed over, or wrote for the last time.

        Others have joined a group since.
        """
        return {id(one) for groups in self._seen.values() for members in groups for one in members}

    def trains(self, key: Key) -> bool:
        """True if a buffer belongs to a module that some optimizer updates, so that forward passes may change it."""
        return key[0] in self.trained_owners

    def written_by(self, optimizer: str) -> list[Key]:
        """Return the parameters that an optimizer may write."""
        numbers = self._slots.by_id
        return [numbers[id(p)] for p in parameters_of(self._handed.optimizers[optimizer]) if id(p) in numbers]

    def see(self, optimizer: str) -> None:
        """Look at an optimizer's groups before it writes: the script may have added parameters.

        Raises UsageError if a replacement could not be given them, or ranks would train them apart.
        """
        self._refuse_unreduced(optimizer)
        groups, seen = self._handed.optimizers[optimizer].param_groups, self._seen[optimizer]
        if len(groups) == len(seen) and all(
            len(group["params"]) == len(members) and all(map(operator.is_, group["params"], members))
            for group, members in zip(groups, seen, strict=True)
        ):
            return
        if is_zero(self._handed.optimizers[optimizer]):
            raise UsageError(
                f"{optimizer}, a ZeroRedundancyOptimizer, was given other parameters after relight.Training(...): its "
                "ranks divide them anew, and a replacement could not. Give it all of them when it is made, and freeze "
                "those that are to wait (requires_grad_(False))"
            )
        refuse_foreign_parameters(self._handed, optimizer)
        self.joined |= {id(one) for members in (*seen, *(group["params"] for group in groups)) for one in members}
        self._seen[optimizer] = members_of_groups(self._handed.optimizers[optimizer])
        self.trained_owners = self._owners_that_train()

    def _refuse_unreduced(self, optimizer: str) -> None:
        """Refuse to train a parameter whose gradients DDP leaves to each rank."""
        if self._unreduced is None:
            self._unreduced = unreduced()
        if not self._unreduced:
            return
        for parameter in parameters_of(self._handed.optimizers[optimizer]):
            if id(parameter) in self._unreduced and parameter.grad is not None:
                name = self._unreduced[id(parameter)]
                raise UsageError(f"{optimizer} is about to train {name}. {NOT_REDUCED.format(name)}")

    # --- in a copy of the state ---------------------------------------------------------------------------------
    def changes(self, optimizer: str) -> Names | None:
        """Return the names of an optimizer's parameters for a copy of the state; None if they are as handed over."""
        now = self._names_of(optimizer)
        return now if now != self._built_with[optimizer] else None

    def in_copy(self, optimizer: str, tree: dict[str, Any]) -> list[torch.Tensor]:
        """Return its parameters as they were where `tree`, a copy of its state, was made."""
        return named(self._names_in_copy(optimizer, tree), self._slots.parameters)

    def adopt(self, trees: dict[str, Any]) -> None:
        """Give each optimizer the parameters that it has in the copy of its state."""
        own = {name: self._names_of(name) for name in trees}
        for name, tree in trees.items():
            names = self._names_in_copy(name, tree)
            if names != own[name]:
                regroup(self._handed.optimizers[name], names, self._slots.parameters)
                state_of(self._handed.optimizers[name]).clear()  # of other parameters, or under other numbers
                self.see(name)

    def _names_in_copy(self, optimizer: str, tree: dict[str, Any]) -> Names:
        names: Names = tree.get("members", self._built_with[optimizer])
        return names

    def _names_of(self, optimizer: str) -> Names:
        return names_in_groups(self._handed.optimizers[optimizer], self._slots.by_id)

    def _owners_that_train(self) -> set[str]:
        trained = {id(parameter) for parameter in self.trained()}

        def has_trained(module: nn.Module) -> bool:
            return any(id(p) in trained for p in module.parameters())

        return {owner for owner, module in self._handed.modules.items() if has_trained(module)}
