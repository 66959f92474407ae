"""Parameters that an optimizer's groups hold. A script may add some late (layers that thaw), so a copy names them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

Key = tuple[str, str]  # of a parameter: the module that was handed over, and the name in it


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return its parameters, in the order by which it numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def members_of_groups(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """The parameters of each group, in lists of its own."""
    return [[*group["params"]] for group in optimizer.param_groups]


def names_in_groups(optimizer: Optimizer, keys: Mapping[int, Key]) -> list[list[str]]:
    """Return the names of its parameters, by group. `keys`: those of all parameters, by their ids."""
    return [["/".join(keys.get(id(p), ("", "?"))) for p in group["params"]] for group in optimizer.param_groups]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings in its groups: everything but parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def named(names: list[list[str]], parameters: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters of these names, in the order by which an optimizer with these groups numbers them."""
    return [parameters[_key(name)] for members in names for name in members]


def resting_of(optimizer: Optimizer, kept: Mapping[Any, Any], keys: Mapping[int, Key]) -> dict[str, torch.Tensor]:
    """Parameters of which it keeps state, and that are in no group now; they may come back. By name."""
    members = {id(parameter) for parameter in parameters_of(optimizer)}
    found = {"/".join(keys[id(p)]): p for p in kept if id(p) not in members and id(p) in keys}
    return dict(sorted(found.items()))


def others_of(kept: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries of an optimizer's state that belong to no parameter, such as a count of its steps, by their names."""
    return {name: value for name, value in kept.items() if not isinstance(name, torch.Tensor)}


def regroup(optimizer: Optimizer, names: list[list[str]], parameters: Mapping[Key, torch.Tensor]) -> None:
    """Make its groups hold these parameters, with the settings that they have; new groups get theirs afterwards.

    Lists and groups that are there already stay the same objects: an optimizer inside of another may hold them too.
    """
    groups = optimizer.param_groups
    del groups[len(names) :]
    groups.extend({"params": []} for _ in range(len(names) - len(groups)))
    for group, members in zip(groups, names, strict=True):
        group["params"][:] = named([members], parameters)


def _key(name: str) -> Key:
    owner, _, rest = name.partition("/")
    return owner, rest
