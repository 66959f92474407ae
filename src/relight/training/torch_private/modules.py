"""Modules: the tables in which `nn.Module` keeps parameters, buffers, modules and hooks.

The tables are read without `nn.Module.__getattr__`, which a script's class may override.
"""

from typing import Any

from torch import Tensor, nn

_TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # as they are called
_DIGESTED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # as in checkpoints
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # of every module: these tables, and more


def parameters_in(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of the module's own parameters, by name."""
    return module._parameters


def buffers_in(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of the module's own buffers, by name."""
    return module._buffers


def modules_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of the modules right inside of it, by name."""
    return module._modules


def tables_in(module: nn.Module) -> list[dict[str, Any]]:
    """Return the tables of parameters, buffers and modules; empty ones before `nn.Module.__init__` has run."""
    return [vars(module).get(name, {}) for name in _TABLES]


def hooks_in(module: nn.Module) -> list[Any]:
    """Return the hooks of forward and backward, table by table, in the order that digests of structure rely on."""
    return [hook for name in _DIGESTED for hook in vars(module).get(name, {}).values()]
