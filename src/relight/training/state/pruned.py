"""Pruning by steps: a replacement, which has what the script builds before its loop, is pruned alike.

Masks and parameters are part of every copy of the state, under the names with which modules were handed over. Besides
them a copy says which hooks prune which parameters, and what the last forward pass has made of each (`layer.weight`):
the next pruning reads that before a forward pass comes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from relight.errors import UsageError
from relight.training.state.optimizers.own_objects import ObjectReader, ObjectWriter
from relight.training.torch_private.modules import parameters_in
from relight.training.torch_private.pruning import give_back, methods_in, prune, put_in_order
from relight.transfer.io.codec import decode_tree, encode_tree

_MOST_BYTES = 16 * 2**20  # of results of forward passes, in the description of a copy
_RESULTS_LEFT_OUT = (
    "{}: pruned while it was trained, and too large for a replacement to get what the last forward pass made of its "
    "weights. Prune after the forward pass of a step, or before the loop"
)


class Pruned:
    """Looks at the modules that were handed over."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """`modules`: as they are when steps begin."""
        self._modules = modules
        self._built = {id(m): [*parameters_in(m)] for module in modules.values() for m in module.modules()}

    def described(self) -> dict[str, dict[str, Any]]:
        """Return, of modules that steps have pruned, names of parameters in order, and hooks as plain values."""
        found: dict[str, dict[str, Any]] = {}
        for owner, path, child in self._children():
            names, methods = [*parameters_in(child)], methods_in(child)
            if methods or self._built.get(id(child), names) != names:
                found.setdefault(owner, {})[path] = [names, _written(methods, path)]
        return found

    def adopt(self, described: Mapping[str, Mapping[str, Any]]) -> bool:
        """Prune modules as they were where `described` was called. Return whether some were pruned otherwise."""
        before = self.described()
        if before == described:
            return False
        for owner, path, child in self._children():
            if path in described.get(owner, ()) or path in before.get(owner, ()):
                names, methods = described.get(owner, {}).get(path, (self._built.get(id(child), []), {}))
                _prune_like(child, ObjectReader(torch.device("cpu")).read(methods))
                put_in_order(child, names)
        return True

    # --- what forward passes made -----------------------------------------------------------------------------------
    def results(self) -> str:
        """Return what the last forward pass made of pruned parameters, as hex, for `adopt_results`."""
        made = {
            "\n".join((owner, path, name)): value.detach()
            for owner, path, child in self._children()
            for name in methods_in(child)
            if isinstance(value := vars(child).get(name), torch.Tensor)
        }
        if sum(value.nbytes for value in made.values()) > _MOST_BYTES:
            return next(iter(made)).replace("\n", "/")
        return encode_tree(made, "pruned").hex() if made else ""

    def adopt_results(self, results: str) -> str:
        """Take these on. Return why equal bits cannot be vouched for, if they were too large."""
        if "/" in results:
            return _RESULTS_LEFT_OUT.format(results)
        for place, value in (decode_tree(bytes.fromhex(results)) if results else {}).items():
            owner, path, name = place.split("\n")
            own = vars(self._modules[owner].get_submodule(path))
            own[name] = value.to(own[name].device) if name in own else value
        return ""

    def _children(self) -> Iterator[tuple[str, str, nn.Module]]:
        return ((owner, path, m) for owner, module in self._modules.items() for path, m in module.named_modules())


def _written(methods: dict[str, Any], path: str) -> Any:
    try:
        return ObjectWriter().write(methods, path)
    except UsageError:  # its class cannot be imported elsewhere: the report says that a replacement lacks the hook
        return {}


def _prune_like(module: nn.Module, methods: Mapping[str, Any]) -> None:
    for name in methods_in(module).keys() - methods.keys():
        give_back(module, name)
    for name, method in methods.items():
        prune(module, name, method)
