"""Pruning by `torch.nn.utils.prune`: what steps prune of a module, a replacement prunes alike.

A pruned parameter keeps its identity under another name (`weight_orig`), beside a buffer with the mask and a hook that
multiplies the two before each forward pass.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from relight.training.torch_private.modules import buffers_in, parameters_in

_LIBRARY = "torch.nn.utils.prune"
_ORIGINAL, _MASK = "_orig", "_mask"


def methods_in(module: nn.Module) -> dict[str, Any]:
    """Return the hooks that prune a module, by the names of what they prune, in their order."""
    library = sys.modules.get(_LIBRARY)
    if library is None or not module._forward_pre_hooks:
        return {}
    hooks = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, library.BasePruningMethod))
    return {hook._tensor_name: hook for hook in hooks}


def prune(module: nn.Module, name: str, method: Any) -> None:
    """Prune a parameter by this hook, with a mask that is still to come, unless it is pruned already."""
    table = parameters_in(module)
    if (parameter := table.pop(name, None)) is not None:
        table[name + _ORIGINAL] = parameter
        buffers_in(module)[name + _MASK] = torch.ones_like(parameter)
    forget_method(module, name)
    module.register_forward_pre_hook(method)
    vars(module)[name] = method.apply_mask(module)


def give_back(module: nn.Module, name: str) -> None:
    """Make a parameter what it is once `prune.remove` was called; its contents are still to come."""
    forget_method(module, name)
    vars(module).pop(name, None)
    buffers_in(module).pop(name + _MASK)
    table = parameters_in(module)
    table[name] = table.pop(name + _ORIGINAL)


def forget_method(module: nn.Module, name: str) -> None:
    """Remove the hook that prunes a parameter."""
    own = methods_in(module).get(name)
    hooks = module._forward_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is own]:
        del hooks[number]


def put_in_order(module: nn.Module, names: Iterable[str]) -> None:
    """Order the table of parameters by these names, if they are those in it."""
    table, wanted = parameters_in(module), [*names]
    if [*table] != wanted and sorted(table) == sorted(wanted):
        before = dict(table)
        table.clear()
        table.update((name, before[name]) for name in wanted)
