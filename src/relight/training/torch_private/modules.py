"""Modules: the tables in which `nn.Module` keeps parameters, buffers, modules and hooks.

The tables are read without `nn.Module.__getattr__`, which a script's class may override.
"""

import dis
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # as they are called
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_DIGESTED = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # as in checkpoints
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # of every module: these tables, and more
# Made by torch itself around a script's module, or into which it makes that: DDP, FSDP2.
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch.fx")


def is_wrapper(module: Any) -> bool:
    """Return whether a module is one of torch's around another one, or was made into one (by `fully_shard`)."""
    return type(module).__module__.startswith(_WRAPPERS)


def wrapper_attributes(kind: type) -> frozenset[str]:
    """Return the names of attributes that torch gives wrappers of this class, and no other modules."""
    if (known := _of_wrappers.get(kind)) is None:
        own = {base.__module__ for base in kind.__mro__ if base.__module__.startswith(_WRAPPERS)}
        codes = [code for name in own for code in _codes_in(sys.modules[name])]
        known = _of_wrappers[kind] = frozenset[str]().union(*map(_assigned_in, codes)) - OWN_ATTRIBUTES
    return known


_of_wrappers: dict[type, frozenset[str]] = {}


def _codes_in(file: types.ModuleType) -> Iterator[types.CodeType]:
    """Yield the code of all functions and methods that are defined in a file."""
    for thing in vars(file).values():
        inside = vars(thing).values() if isinstance(thing, type) else [thing]
        if getattr(thing, "__module__", "") == file.__name__:
            found = (getattr(one, "__func__", one) for one in inside)
            yield from (one.__code__ for one in map(inspect.unwrap, found) if isinstance(one, types.FunctionType))


def _assigned_in(code: types.CodeType) -> set[str]:
    own = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}
    return own.union(*(_assigned_in(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def parameters_in(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table of the module's own parameters, by name."""
    return module._parameters


def buffers_in(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of the module's own buffers, by name."""
    return module._buffers


def modules_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of the modules right inside of it, by name."""
    return module._modules


_OF_LAYERS = "torch.nn.modules."


def is_layer_class(kind: type) -> bool:
    """Return whether a class is one of torch's own layers, losses or activations."""
    return issubclass(kind, nn.Module) and kind.__module__.startswith(_OF_LAYERS)


def is_stateless(module: nn.Module) -> bool:
    """Return whether a layer of torch's own holds no tensors, modules or hooks: nothing but its arguments."""
    held = (one for table in tables_in(module) for one in table.values())
    return all(one is None for one in held) and not any(True for _ in hook_tables_of(module))


def attributes_of_layer(module: nn.Module) -> dict[str, Any]:
    """Return what makes a layer without state more than an empty module; tensors that it might have are None."""
    found = {name: one for name, one in vars(module).items() if name not in OWN_ATTRIBUTES or name == "training"}
    return found | {name: table for name, table in zip(_TABLES, tables_in(module), strict=True) if table}


def empty_layer(kind: Any) -> Any:
    """Make a layer without calling code of its class."""
    made = object.__new__(kind)
    nn.Module.__init__(made)
    return made


def tables_in(module: nn.Module) -> list[dict[str, Any]]:
    """Return the tables of parameters, buffers and modules; empty ones before `nn.Module.__init__` has run."""
    return [vars(module).get(name, {}) for name in _TABLES]


def hook_tables_of(owner: Any) -> Iterator[tuple[str, dict[int, Any]]]:
    """Yield name and contents of each table of hooks that a module, a tensor or an optimizer has, less empty ones."""
    is_tensor = isinstance(owner, Tensor)
    for name in HOOK_TABLES if isinstance(owner, nn.Module) else _OF_TENSORS if is_tensor else _OF_OPTIMIZERS:
        if hooks := getattr(owner, name, None):
            yield name, hooks


def hook_table(owner: Any, name: str) -> dict[int, Any] | None:
    """Return one of these tables; None if it is no name of one, or the owner has none."""
    is_table = name in (*HOOK_TABLES, *_OF_TENSORS, *_OF_OPTIMIZERS)
    return getattr(owner, name, None) if is_table else None


def hooks_in(module: nn.Module) -> list[Any]:
    """Return the hooks of forward and backward, table by table, in the order that digests of structure rely on."""
    return [hook for table in hook_tables_in(module) for hook in table.values()]


def hook_tables_in(module: nn.Module) -> list[dict[int, Any]]:
    """Return these tables, also empty ones."""
    return [vars(module).get(name, {}) for name in _DIGESTED]
