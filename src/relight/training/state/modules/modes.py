"""Training modes of modules, `requires_grad` of parameters, and which have gradients, as a copy of the state has them.

A script cannot tell zeros of a gradient that it makes zero first. But whether there is one shows: `p.grad is not None`,
and `zero_grad` calls more of torch, which a mode of the script may count.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

# By module handed over: modes of its modules, flags of its parameters, and which have gradients, as 0 and 1.
Modes = dict[str, list[str]]


def modes_of(modules: Mapping[str, nn.Module]) -> Modes:
    """Return which modules are in training mode, and which parameters require gradients.

    One that a step has changed in place by others' gradients (an average, outside `no_grad`) has a history instead.
    """
    return {
        owner: [
            "".join("01"[child.training] for child in module.modules()),
            "".join("01"[parameter.requires_grad and parameter.is_leaf] for parameter in module.parameters()),
            "".join("01?"[int(found)] for found in gradients_of(module.parameters())),
        ]
        for owner, module in modules.items()
    }


def adopt_modes(modules: Mapping[str, nn.Module], modes: Modes) -> None:
    """Set the modes and flags that `modes_of` returned for modules of the same layout."""
    for owner, (training, trained, *_) in modes.items():
        module = modules[owner]
        for child, mode in zip(module.modules(), training, strict=False):
            child.training = mode == "1"
        for parameter, trains in zip(module.parameters(), trained, strict=False):
            if parameter.requires_grad != (trains == "1"):
                if not parameter.is_leaf:
                    parameter.detach_()
                parameter.requires_grad_(trains == "1")


def make_gradients(modules: Mapping[str, nn.Module], modes: Modes) -> None:
    """Give gradients to the parameters that had some where `modes_of` was asked, zeros, and to no others."""
    for owner, (_, _, *gradients) in modes.items():
        parameters = list(modules[owner].parameters())
        give_gradients(parameters, ["01?".index(found) for found in "".join(gradients)])


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return, for each parameter, 0 if it has no gradient, 1 if it has one, and 2 if that is sparse."""
    return [(g := p.grad) is not None and 1 + (g.layout is not torch.strided) for p in parameters]


def give_gradients(parameters: Sequence[torch.Tensor], have: Sequence[int]) -> None:
    """Make `gradients_of` the parameters what it was, by zeros where one is missing; a sparse one is not made."""
    for parameter, found in zip(parameters, have, strict=False):
        if not found:
            parameter.grad = None
        elif found == 1 and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
