"""Attributes and hooks that a script keeps on modules and parameters that were handed over, by their places."""

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from relight.script_files import is_user_type
from relight.training.carried.code.refs import Place
from relight.training.carried.values.parts import Parts
from relight.training.state.modules.plain_values import plain_bytes
from relight.training.torch_private.modules import OWN_ATTRIBUTES, hook_tables_of, wrapper_attributes


def attributes_of_parts(parts: Parts, *, kept: bool = False) -> Iterator[tuple[Place, Any]]:
    """Values on modules and parameters that were handed over, less their own state; `kept`: with plain attributes."""
    for root, owner in roots_of(parts):
        own = OWN_ATTRIBUTES | wrapper_attributes(type(owner)) if isinstance(owner, nn.Module) else frozenset()
        for attribute, value in [one for one in list(vars(owner).items()) if one[0] not in own]:
            if (kept and attribute[0] != "_") or is_of_script(owner, attribute, value):
                yield (root, ("attribute", attribute, "")), value


def is_of_script(owner: Any, attribute: str, value: Any) -> bool:
    """Return whether an attribute of what was handed over may be the script's, and is not kept with its owner."""
    if isinstance(owner, nn.Module):
        is_own = attribute[0] != "_" or uses_itself(owner, attribute)
        return is_own and not is_kept_with_modules(attribute, value)
    return attribute[0] != "_"


def uses_itself(owner: Any, attribute: str) -> bool:
    """Return whether methods that the script defines use this attribute: libraries have private ones of their own."""
    if attribute in OWN_ATTRIBUTES:
        return False
    methods = (method for base in type(owner).__mro__ if is_user_type(base) for method in vars(base).values())
    return any(isinstance(one, types.FunctionType) and attribute in one.__code__.co_names for one in methods)


def hooks_of_parts(parts: Parts) -> Iterator[tuple[Place, Any]]:
    """Hooks on modules and parameters that were handed over: functions and objects that backward or forward calls."""
    for name, owner in parts.owners():
        root = "inner" if isinstance(owner, nn.Module) else "slot"
        yield from hooks_of(((root, name[1], name[2]),), owner)


def hooks_of(place: Place, owner: Any) -> Iterator[tuple[Place, Any]]:
    for table, hooks in hook_tables_of(owner):
        for number, hook in enumerate(list(hooks.values())):
            yield (*place, ("attribute", table, ""), ("member", str(number), "")), hook


def is_kept_with_modules(name: str, value: Any) -> bool:
    """Return whether an attribute of a module is kept with the module's own state. None may give way to an object."""
    if value is None:
        return False
    return name in OWN_ATTRIBUTES or isinstance(value, torch.Tensor) or plain_bytes(value) is not None


def roots_of(parts: Parts) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Modules and parameters that were handed over."""
    for name, owner in parts.owners():
        yield ("slot" if isinstance(owner, torch.Tensor) else "inner", name[1], name[2]), owner
