"""The structure of modules: their submodules, parameters, buffers and hooks, by their paths; hooks of optimizers.

A replacement has what the script builds before its loop. What steps change of that later (a pruned layer, another
head, a hook) it lacks; so every copy of the state says how the modules of its source are built.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash
from torch import nn
from torch.optim import Optimizer

from relight.training.state.modules.hooks import hook_name
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.modules import (
    buffers_in,
    hook_tables_of,
    hooks_in,
    is_wrapper,
    modules_in,
    parameters_in,
)
from relight.words import listed


class Structure:
    """The structure of the modules and optimizers that were handed over."""

    def __init__(self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
        self._modules, self._optimizers = modules, optimizers
        # Names as they were handed over: a layer, or a parameter, may come to stand in another's place.
        self._names: dict[int, tuple[str, Any]] = {}
        is_divided = any(is_distributed(p) for module in modules.values() for p in module.parameters())
        for owner, module in modules.items():
            parameters = () if is_divided else module.named_parameters()  # FSDP2 exchanges them by itself
            for path, part in (*module.named_modules(), *parameters):
                self._names[id(part)] = f"{owner}/{path}", part

    def described(self) -> dict[str, list[str]]:
        """A digest of each module in each that was handed over, one after the other, and of each optimizer's hooks."""
        found = {
            owner: [self._digest(path, child) for path, child in module.named_modules()]
            for owner, module in self._modules.items()
        }
        return found | {f"optimizer {name}": [_digest_of_hooks(one)] for name, one in self._optimizers.items()}

    def differs(self, other: Mapping[str, list[str]]) -> str:
        """Name the modules and optimizers that are built otherwise than where `other` was described; empty: none is."""
        return listed(list(dict.fromkeys(self._differing(other))))

    def _differing(self, other: Mapping[str, list[str]]) -> Iterator[str]:
        for owner, own in self.described().items():
            theirs = other.get(owner, own)
            if len(own) != len(theirs):
                yield owner
                continue
            paths = [path for path, _ in self._modules[owner].named_modules()] if owner in self._modules else [""]
            for path, one, another in zip(paths, own, theirs, strict=True):
                if one != another:
                    yield f"{owner}.{path}" if path else owner

    def _digest(self, path: str, module: nn.Module) -> str:
        inside = {} if is_wrapper(module) else vars(module)  # torch looks after wrappers itself
        own_methods = [name for name in inside if _is_of_class(module, name)]  # put there, or put back, as they were
        methods = [
            f"{name}={getattr(value, '__qualname__', '')}"
            for name, value in inside.items()
            if callable(value) and name not in own_methods
        ]
        hooks = [] if is_wrapper(module) else hooks_in(module)
        parameters = parameters_in(module)
        hooks += [hook for one in parameters.values() if one is not None for hook in _hooks_of(one)]
        own = f"{self._named(parameters)} {[*buffers_in(module)]} {self._named(modules_in(module))}"
        text = f"{path} {type(module).__qualname__} {own} {_names(hooks)} {methods}"
        return xxhash.xxh32_hexdigest(text.encode())

    def _named(self, table: Mapping[str, Any]) -> list[str]:
        return [f"{name}={self._names.get(id(one), ('',))[0]}" for name, one in table.items()]


def _is_of_class(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is what the module would have without it: a method of its class."""
    value = vars(module)[name]
    is_own = getattr(value, "__self__", None) is module
    return is_own and getattr(value, "__func__", None) is getattr(type(module), name, None)


def _digest_of_hooks(optimizer: Optimizer) -> str:
    return xxhash.xxh32_hexdigest(f"{_names(_hooks_of(optimizer))}".encode())


def _hooks_of(owner: Any) -> list[Any]:
    return [hook for _, hooks in hook_tables_of(owner) for hook in hooks.values()]


def _names(hooks: Iterable[Any]) -> list[str]:
    return [name for hook in hooks if (name := hook_name(hook))]
