"""Training modes of modules and `requires_grad` of parameters, as a copy of the state carries them."""

from collections.abc import Mapping

from torch import nn

Modes = dict[str, list[str]]  # by module handed over: modes of its modules and flags of its parameters, as 0 and 1


def modes_of(modules: Mapping[str, nn.Module]) -> Modes:
    """Return which modules are in training mode, and which parameters require gradients.

    One that a step has changed in place by others' gradients (an average, outside `no_grad`) has a history instead.
    """
    return {
        owner: [
            "".join("01"[child.training] for child in module.modules()),
            "".join("01"[parameter.requires_grad and parameter.is_leaf] for parameter in module.parameters()),
        ]
        for owner, module in modules.items()
    }


def adopt_modes(modules: Mapping[str, nn.Module], modes: Modes) -> None:
    """Set the modes and flags that `modes_of` returned for modules of the same layout."""
    for owner, (training, trained) in modes.items():
        module = modules[owner]
        for child, mode in zip(module.modules(), training, strict=False):
            child.training = mode == "1"
        for parameter, trains in zip(module.parameters(), trained, strict=False):
            if parameter.requires_grad != (trains == "1"):
                if not parameter.is_leaf:
                    parameter.detach_()
                parameter.requires_grad_(trains == "1")
