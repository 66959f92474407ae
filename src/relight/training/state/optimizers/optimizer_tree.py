"""An optimizer's state as a tree that can be copied to another rank, and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from relight.training.state.modules.slots import Key, Slots
from relight.training.state.optimizers.own_objects import ObjectReader, ObjectWriter
from relight.training.state.optimizers.parameter_groups import named, others_of, parameters_of, resting_of, settings_of
from relight.training.torch_private.distributed.mesh import as_part_like, is_distributed
from relight.training.torch_private.distributed.zero import state_of
from relight.transfer.io.codec import local_part
from relight.transfer.io.strides import strides_of


def own_numbers(optimizer: Optimizer) -> dict[int, dict[str, float]]:
    """Return Python's floats in an optimizer's state, by the number of the parameter (LBFGS: the loss of its rank)."""
    parameters = parameters_of(optimizer)
    kept = state_of(optimizer)
    found = {
        i: {k: v for k, v in kept[p].items() if isinstance(v, float)} for i, p in enumerate(parameters) if p in kept
    }
    return {index: numbers for index, numbers in found.items() if numbers}


def optimizer_tree(optimizer: Optimizer, has_own_numbers: bool, keys: Mapping[int, Key]) -> dict[str, Any]:
    """Return settings and state. Python's floats are left out if they differ between ranks (`has_own_numbers`)."""
    kept = state_of(optimizer)
    others = others_of(kept)
    if has_own_numbers:
        of_parameters = ((p, values) for p, values in kept.items() if isinstance(p, torch.Tensor))
        kept = {p: {k: v for k, v in values.items() if not isinstance(v, float)} for p, values in of_parameters}
    resting = resting_of(optimizer, kept, keys)
    tree = {
        "groups": settings_of(optimizer),
        # By number: a tensor's path must not depend on which other parameters have been used so far.
        "state": {i: dict(kept[p]) for i, p in enumerate(parameters_of(optimizer)) if p in kept},
        **({"resting": {name: dict(kept[p]) for name, p in resting.items()}} if resting else {}),
        **({"others": others} if others else {}),
    }
    written: dict[str, Any] = ObjectWriter().write(tree, "the optimizer's state")
    return written


def adopt_optimizer(optimizer: Optimizer, tree: dict[str, Any], slots: Slots) -> None:
    """Put the settings and state of `tree` into an optimizer with the same parameters.

    In the order of `tree`, which counts for digests: a checkpoint that was loaded may have brought another one.
    """
    parameters = parameters_of(optimizer)
    objects = ObjectReader(parameters[0].device if parameters else torch.device("cpu"))
    for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
        for key in group.keys() - saved.keys() - {"params"}:
            del group[key]
        for key, value in saved.items():
            mine = group.pop(key, None)
            group[key] = _in_place(value, mine) if isinstance(value, torch.Tensor) else objects.read(value, mine)
    received, kept = tree["state"], state_of(optimizer)
    for index, parameter in enumerate(parameters):
        if index not in received:
            kept.pop(parameter, None)
            continue
        own = kept[parameter]
        for key in [key for key in own if key not in received[index]]:
            del own[key]
        for key, value in received[index].items():
            mine = own.pop(key, None)
            own[key] = _placed(objects.read(value, mine), mine, parameter)
    for parameter in resting_of(optimizer, kept, slots.by_id).values():
        del kept[parameter]
    for name, values in tree.get("resting", {}).items():
        (parameter,) = named([[name]], slots.parameters)
        kept[parameter] = {key: _placed(objects.read(value), None, parameter) for key, value in values.items()}
    others = tree.get("others", {})
    for key in others_of(kept).keys() - others.keys():
        del kept[key]
    for key, value in others.items():
        mine = kept.pop(key, None)
        kept[key] = _in_place(value, mine) if isinstance(value, torch.Tensor) else objects.read(value, mine)


def order_of(optimizer: Optimizer) -> list[int]:
    """Return the numbers of the parameters that it keeps state of, in the order in which they came into it."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    return [numbers[id(p)] for p in state_of(optimizer) if id(p) in numbers]


def adopt_order(optimizer: Optimizer, order: list[int]) -> None:
    """Put what it keeps of parameters into this order: an optimizer may add up over its own state."""
    if order == order_of(optimizer):
        return
    parameters, kept = parameters_of(optimizer), state_of(optimizer)
    for parameter in (parameters[number] for number in order):
        kept[parameter] = kept.pop(parameter)


def _placed(value: Any, own: Any, parameter: torch.Tensor) -> Any:
    """Return a received value on the device where the optimizer keeps it, in its own tensor where that fits."""
    if not isinstance(value, torch.Tensor):
        return value
    placed = _in_place(value, own)
    if placed is own:
        return own
    divided = is_distributed(parameter) and value.shape == local_part(parameter).shape
    if divided and (value.ndim > 0 if own is None else is_distributed(own)):
        return as_part_like(value, parameter)
    return value.to(parameter.device) if value.shape == parameter.shape else value


def _in_place(value: torch.Tensor, own: Any) -> Any:
    """Copy a received value into the tensor that is in its place, if that fits; return the one that is to be there."""
    mine = local_part(own) if isinstance(own, torch.Tensor) else None
    if mine is None or (mine.shape, mine.dtype, strides_of(mine)) != (value.shape, value.dtype, strides_of(value)):
        return value
    if mine.data_ptr() != value.data_ptr():
        mine.copy_(value)
    return own
