"""The structure of modules: their submodules, parameters, buffers and hooks, by their paths.

A replacement has what the script builds before its loop. What steps change of that later (a pruned layer, another
head, a hook) it lacks; so every copy of the state says how the modules of its source are built.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import xxhash
from torch import nn

from relight.training.state.modules.hooks import hook_name
from relight.training.state.modules.modes import modes_of
from relight.training.torch_private.modules import buffers_in, hooks_in, parameters_in
from relight.words import listed

_DIGITS = 8  # for each module
_WRAPPERS = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch.fx")  # they look after themselves


def structure(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """A digest of each module in each of `modules`, one after the other."""
    return {
        owner: "".join(_digest(path, child) for path, child in module.named_modules())
        for owner, module in modules.items()
    }


def structure_differs(modules: Mapping[str, nn.Module], other: Mapping[str, str]) -> str:
    """Name the modules that are built otherwise than where `other` was taken; empty: none is."""
    names = list(dict.fromkeys(_differing(modules, other)))
    return listed(names)


def _differing(modules: Mapping[str, nn.Module], other: Mapping[str, str]) -> Iterator[str]:
    for owner, own in structure(modules).items():
        theirs = other.get(owner, own)
        paths = [path for path, _ in modules[owner].named_modules()]
        if len(own) != len(theirs):
            yield owner
            continue
        for place, path in enumerate(paths):
            part = slice(place * _DIGITS, (place + 1) * _DIGITS)
            if own[part] != theirs[part]:
                yield f"{owner}.{path}" if path else owner


def _digest(path: str, module: nn.Module) -> str:
    is_wrapper = type(module).__module__.startswith(_WRAPPERS)
    inside = {} if is_wrapper else vars(module)
    hooks = [] if is_wrapper else [name for hook in hooks_in(module) if (name := hook_name(hook))]
    methods = [f"{name}={getattr(value, '__qualname__', '')}" for name, value in inside.items() if callable(value)]
    own = f"{[*parameters_in(module)]} {[*buffers_in(module)]}"
    text = f"{path} {type(module).__qualname__} {own} {hooks} {methods}"
    return xxhash.xxh32_hexdigest(text.encode())


class BuiltModules:
    """Compares modes, `requires_grad`, layers, hooks and the parameters themselves with those of an earlier moment."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._noted: tuple[Any, ...] | None = None

    def note(self) -> None:
        """Remember them as they are now."""
        self._noted = self._described()

    def have_changed(self) -> bool:
        """Return whether they have changed since they were noted, if they were; and forget that."""
        noted, self._noted = self._noted, None
        return noted is not None and noted != self._described()

    def _described(self) -> tuple[Any, ...]:
        modes = {owner: (training, trained) for owner, (training, trained, _) in modes_of(self._modules).items()}
        parameters = [id(parameter) for module in self._modules.values() for parameter in module.parameters()]
        return modes, structure(self._modules), parameters
