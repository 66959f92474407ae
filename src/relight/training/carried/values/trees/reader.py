"""Makes values of the trees as which another process has written them down.

Objects with which that process began (its *homes*: the list that was made before the loop, and is filled in it) are
this process's own homes here, so that names which are not carried see them too.
"""

import itertools
import random
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from relight.training.carried.values.homes import STEP, Homes, label_of
from relight.training.carried.values.parts import NoParts, Parts
from relight.training.carried.values.trees.buffers import BufferReader
from relight.training.carried.values.trees.words import TAG, Unsupported, class_name
from relight.training.state.values.cells import set_cells_state
from relight.training.state.values.generators import set_generator_state, set_stream_state
from relight.training.state.values.kinds import (
    STREAMS,
    attributes_of,
    base_of,
    factory_of,
    fill,
    kind_of,
    kind_of_type,
    made_of,
    refill,
)
from relight.training.torch_private.distributed.divided import describe_division, make_divided
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.transfer.io.codec import local_part
from relight.transfer.io.constants import callable_of, read_constant
from relight.transfer.io.strides import overlaps, with_strides

_STREAMS = {kind.__name__: kind for kind in STREAMS}


class Reader:
    """Reads what one `Writer` wrote, in the same order."""

    def __init__(self, homes: Homes, parts: Parts | None = None, holder_at: Callable[[str], Any] | None = None) -> None:
        """`holder_at`: the object at a place; raises Unsupported if there is none."""
        self._homes = homes
        self._parts = parts or NoParts()
        self._holder_at = holder_at
        self._made: list[Any] = []  # each object that was read, by its number
        self._memories: dict[int, torch.Tensor] = {}  # that several tensors share, by its number
        self._buffers = BufferReader()

    def read(self, name: str, tree: Any) -> Any:
        """The value that a tree tells of. Raises Unsupported for a class that this process does not have."""
        return self._read(name, tree)

    def _read(self, name: str, tree: Any, home: Any = None, *, is_placed: bool = False) -> Any:
        if isinstance(tree, tuple):
            return tuple(self._each(name, tree))
        if not isinstance(tree, (dict, list)):
            return tree
        node: Any = tree
        tag = "list" if isinstance(node, list) else node[TAG]
        if tag == "same":
            return self._made[node["n"]]
        if tag in ("new", "home"):
            return self._read(name, node["v"], None if tag == "new" else self._homes.at(node["h"]), is_placed=True)
        if tag == "part":
            return self._part(node["p"])
        if tag == "holder":
            if self._holder_at is None:
                raise Unsupported("an object that holds other values which are carried")
            return self._holder_at(node["k"])
        if tag == "own":
            if (own := self._homes.at(node["h"])) is None:
                raise Unsupported("a function or lock that this process does not have")
            return own
        if tag == "record":
            return _class_of(node["c"])(*self._each(name, node["v"]))
        if tag == "number":
            return node["v"]
        if tag == "constant":
            return _constant_of(node)
        if tag == "callable":
            return _callable_of(node["v"])
        if not is_placed:
            home = self._homes.at(name)
        if tag == "shared":
            self._made.append(self._view(node, home))
            return self._made[-1]
        if tag == "view":
            self._made.append(self._buffers.read(node, home))
            return self._made[-1]
        if tag == "divided":
            self._made.append(self._divided(node, home))
            return self._made[-1]
        if tag in _READERS:
            made = _READERS[tag](node, home)
            self._made.append(made)
            if "a" in node:
                vars(made).update(self._read(f"{name}{STEP}", node["a"]))
            return made
        return self._container(tag, name, node, home)

    def _view(self, node: Any, home: Any) -> torch.Tensor:
        """A tensor in memory that it shares with others that are read here."""
        shape, stride, offset = node["a"]
        if "v" in node:
            self._memories[node["m"]] = _memory_in(node, self._homes.at(node["h"]) if node["h"] else None)
        memory = self._memories[node["m"]]
        made = memory.as_strided(shape, stride, memory.storage_offset() + offset)
        if isinstance(home, torch.Tensor) and _lies_as(home, made):
            return home
        return made.requires_grad_() if node["g"] else made

    def _divided(self, node: Any, home: Any) -> torch.Tensor:
        """A DTensor, of which the tree has this rank's part."""
        if isinstance(home, torch.Tensor) and is_distributed(home) and describe_division(home) == node["a"]:
            local_part(home).copy_(node["v"])
            return home
        try:
            return make_divided(node["v"], node["a"], (one for _, one in self._parts.owners()))
        except LookupError as problem:
            raise Unsupported(str(problem)) from None

    def _part(self, name: Any) -> Any:
        try:
            return self._parts.at(name)
        except LookupError as problem:
            raise Unsupported(str(problem)) from None

    def _each(self, name: str, trees: Any) -> list[Any]:
        return [self._read(f"{name}{STEP}{index}", one) for index, one in enumerate(trees)]

    def _container(self, tag: str, name: str, tree: Any, home: Any) -> Any:
        """Read a container. It may hold itself, so it is made before its members are read."""
        if tag == "set" and tree["c"] == "builtins:frozenset":
            return frozenset(self._each(name, tree["v"]))
        made = home if _is_like(tag, tree, home) else self._empty(tag, name, tree)
        self._made.append(made)
        if tag == "objects":
            fill(made, self._each(name, tree["v"]))
        elif tag == "object":
            values = {part: self._read(f"{name}{STEP}{part}", one) for part, one in tree["v"]}
            for part in attributes_of(made).keys() - values.keys():
                object.__delattr__(made, part)
            for part, one in values.items():
                object.__setattr__(made, part, one)
        elif tag == "dict":
            items = [
                (key := self._read("", at), self._read(f"{name}{STEP}{label_of(index, key)}", one))
                for index, (at, one) in enumerate(tree["v"])
            ]
            refill(made, items)
        else:
            values_of = self._each(name, tree if isinstance(tree, list) else tree["v"])
            base = base_of(made)
            base.clear(made)
            (base.update if tag == "set" else base.extend)(made, values_of)
        if isinstance(tree, dict) and "a" in tree:
            vars(made).update(self._read(f"{name}{STEP}", tree["a"]))
        return made

    def _empty(self, tag: str, name: str, tree: Any) -> Any:
        if isinstance(tree, list):
            return []
        if tag == "objects":
            import numpy as np

            return np.empty(tree["s"], object)
        kind: Any = _class_of(tree["c"])
        made = kind.__new__(kind) if tag != "object" else made_of(kind)
        if tag == "deque":
            deque.__init__(made, maxlen=tree["n"])
        if tree.get("f") is not None:
            own = factory_of(self._homes.at(name))  # a function without a name
            made.default_factory = callable_of(tree["f"]) if tree["f"] else own
            if made.default_factory is None:
                raise Unsupported("a defaultdict whose function has no name")
        return made


def _is_like(tag: str, tree: Any, home: Any) -> bool:
    """Return whether an object can take on what a tree tells of."""
    if home is None or kind_of(home) != tag:
        return False
    if tag == "objects":
        return bool(list(home.shape) == tree["s"])
    if tag == "deque" and home.maxlen != tree["n"]:
        return False
    return bool(class_name(home) == ("builtins:list" if isinstance(tree, list) else str(tree["c"])))


def _memory_in(node: Any, home: Any) -> torch.Tensor:
    """The memory that a tree tells of: that of the object with which this process began, if it is as large."""
    contents: torch.Tensor = node["v"]
    if isinstance(home, torch.Tensor) and home.dtype == contents.dtype and home.is_contiguous():
        flat = home.detach().view(-1)
        if flat.shape == contents.shape and not home.is_inference():
            flat.copy_(contents)
            return flat
    return contents


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _read_tensor(tree: Any, old: Any) -> torch.Tensor:
    value: torch.Tensor = tree["v"]
    kind = _class_of(tree["c"]) if "c" in tree else None
    fits = isinstance(old, torch.Tensor) and old.shape == value.shape and old.dtype == value.dtype
    fits &= kind is None or type(old) is kind
    if (
        fits
        and not old.is_inference()
        and not overlaps(old)
        and list(old.stride()) == tree.get("s", list(value.stride()))
    ):
        with torch.no_grad():
            old.copy_(value)
        if old.is_leaf and old.requires_grad:
            old.grad = tree.get("r")
        return old  # type: ignore[no-any-return]
    made = with_strides(value, tree["s"]) if "s" in tree else value
    made = made if kind is None else made.as_subclass(kind)
    if tree["g"]:
        made.requires_grad_().grad = tree.get("r")
    return made


def _read_cells(tree: Any, old: Any) -> Any:
    if old is None or class_name(old) != tree["c"]:
        raise Unsupported(f"a {tree['c'].partition(':')[2]}, which this process does not have")
    set_cells_state(old, tree["v"])
    return old


def _read_generator(tree: Any, old: Any) -> Any:
    state, kind = tree["v"], tree["c"]
    if type(old).__name__ != kind:
        old = _new_generator(kind, state)
    if isinstance(old, random.Random):
        version, words, gauss = state["state"] if isinstance(state, dict) else state
        drawn = version, tuple(array("I", words)), gauss
        state = {**state, "state": drawn} if isinstance(state, dict) else drawn
    set_generator_state(old, state)
    return old


def _new_generator(kind: str, state: Any) -> Any:
    if kind == "count":
        return itertools.count()
    if (isinstance(state, tuple) and kind not in ("Random", "RandomState")) or (
        isinstance(state, dict) and "own" in state
    ):
        raise Unsupported(f"a {kind}, which this process does not have")
    if isinstance(state, dict) and kind in ("SeedSequence", state.get("bit_generator")):
        import numpy as np

        return getattr(np.random, kind)()
    if kind in ("Generator", "RandomState"):
        if isinstance(state, torch.Tensor):
            return torch.Generator()
        import numpy as np

        if kind == "RandomState":
            return np.random.RandomState()
        return np.random.Generator(getattr(np.random, state["bit_generator"])())
    return random.Random()


def _read_array(tree: Any, old: Any) -> Any:
    import numpy as np

    value = tree["v"]
    if "s" in tree:  # the axes from the outermost in memory to the innermost
        made = np.empty([value.shape[axis] for axis in tree["s"]], value.dtype).transpose(np.argsort(tree["s"]))
        made[...] = value
        value = made
    if "c" in tree:
        value = value.view(getattr(np, tree["c"]))
    fits = type(old) is type(value) and getattr(old, "shape", None) == value.shape and old.dtype == value.dtype
    if fits and (old.base is not None) == tree.get("b", False) and _axes_of(old) == _axes_of(value):
        old[...] = value
        return old
    return value


def _axes_of(value: Any) -> list[int]:
    """The axes from the outermost in memory to the innermost."""
    return sorted(range(value.ndim), key=lambda axis: (-value.strides[axis], axis))


def _read_bytes(tree: Any, old: Any) -> Any:
    if not tree["c"]:
        made: Any = old if isinstance(old, bytearray) else bytearray()
        made[:] = tree["v"]
        return made
    made = old if getattr(old, "typecode", "") == tree["c"] else array(tree["c"])
    made[:] = array(tree["c"], tree["v"])
    return made


def _read_stream(tree: Any, old: Any) -> Any:
    made = old if type(old).__name__ == tree["c"] and not old.closed else _STREAMS[tree["c"]]()
    set_stream_state(made, tree["v"])
    return made


def _constant_of(tree: Any) -> Any:
    try:
        return read_constant(tree["c"], tree["v"])
    except LookupError:
        raise Unsupported(f"a {tree['c']}, which this process does not have") from None


def _callable_of(name: str) -> Any:
    found = callable_of(name)
    if found is None:
        raise Unsupported(f"{name}, which this process does not have")
    return found


def _class_of(name: str) -> type:
    """A class that this process has already, by its name."""
    found = callable_of(name)
    if not isinstance(found, type) or kind_of_type(found) in ("plain", "number", "opaque"):
        raise Unsupported(f"a {name}, which this process does not have")
    return found


_READERS: dict[str, Any] = {
    "stream": _read_stream,
    "tensor": _read_tensor,
    "array": _read_array,
    "bytearray": _read_bytes,
    "generator": _read_generator,
    "cells": _read_cells,
}
