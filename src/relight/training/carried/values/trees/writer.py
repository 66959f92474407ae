"""Writes values that are carried down as trees of plain values and tensors.

Objects that several names share, or several places of one value, are one object again where they are read.
"""

import itertools
import random
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from relight.script_files import is_user_type
from relight.training.carried.values.homes import STEP, Homes, is_one_object, label_of, members_of
from relight.training.carried.values.parts import NoParts, Parts
from relight.training.carried.values.trees.buffers import Buffers, write_view
from relight.training.carried.values.trees.memories import Memories, Memory
from relight.training.carried.values.trees.words import TAG, Unsupported, class_name, name_of
from relight.training.state.modules.references import NotNameable
from relight.training.state.values.cells import cells_state
from relight.training.state.values.generators import counter_of, generator_state, stream_state
from relight.training.state.values.kinds import (
    PLAIN,
    attributes_beside,
    blocks_in,
    factory_of,
    holds_words,
    is_fixed,
    items_of,
    kind_of,
    members_in,
)
from relight.training.state.values.marks import DEEPEST, LONG, Mark, gradient_of
from relight.training.torch_private.distributed.divided import describe_division, is_on_mesh_of_any
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.transfer.io.codec import Node, flat_dict, flatten, local_part
from relight.transfer.io.constants import name_of_callable, write_constant

_SEPARATOR = "\x1f"  # between the parts of a place
_CONTAINERS = frozenset({"list", "deque", "set", "dict"})
_LASTING = frozenset({list, tuple, dict, deque})
_WORDS = frozenset({str})
_NAME_OF_DICT = class_name({})
_LARGE = 2**63  # larger numbers are written as text
_LEAVES = itertools.chain.from_iterable


class Lasting:
    """A value as it was written down: valid for as long as its mark, and the names of objects, are the same."""

    __slots__ = ("first", "names", "objects", "tree")

    def __init__(self, tree: Node, objects: list[Any], first: int, names: int) -> None:
        """`objects`: what it holds of objects that can change, which were the `first` and the next ones written."""
        self.tree, self.objects, self.first, self.names = tree, objects, first, names


class Writer:
    """Writes down the values of one moment, which may share objects."""

    def __init__(self, homes: Homes, parts: Parts | None = None, holders: Mapping[int, str] | None = None) -> None:
        """`holders`: by `id`, the places of objects of which only attributes are written, each as a value."""
        self._homes = homes
        self._parts = parts or NoParts()
        self._holders = holders or {}
        self._numbers: dict[int, int] = {}  # of objects that were written, in that order
        self._alive: list[Any] = []
        self._begun = 0
        self._lasts = self._grows = True
        self._memories = Memories(self._parts)
        self._buffers = Buffers()
        self._written_memories: set[int] = set()

    def look_at(self, value: Any) -> None:
        """To be called with all that will be written: tensors that share memory do so again where they are read."""
        if not holds_words(value) and (blocks := list(blocks_in(value, ("tensor", "array")))):
            self._memories.add(blocks)
            self._buffers.add(blocks)

    def write(self, name: str, value: Any, *, grows: bool = True) -> Any:
        """As a tree for `encode_tree`. `grows`: as in `remember`. Raises Unsupported."""
        self._begun, self._lasts, self._grows = len(self._alive), True, grows
        try:
            return self._write(name, value, 0)
        except Unsupported:
            self.take_back()
            raise

    def lasting(self, tree: Any) -> Lasting | None:
        """The value that was written last, as this tree, for `write_again`. None: its mark does not tell all of it.

        A mark does of plain values, and of containers of Python's own that hold nothing else.
        """
        if not self._lasts:
            return None
        return Lasting(flatten(tree, ""), self._alive[self._begun :], self._begun, self._homes.count)

    def write_words(self, name: str, value: dict[Any, Any]) -> tuple[Mark, Lasting] | None:
        """Mark a dict of words and numbers, and write it down: as `remember` and `write` do, in a fifth of their time.

        None: it is another one, or shared with what was written before.
        """
        items, number = list(value.items()), len(self._alive)
        words = [*_LEAVES(items)]
        is_plain = _WORDS.issuperset(map(type, words[::2])) and PLAIN.issuperset(map(type, words[1::2]))
        if not is_plain or len(items) > LONG or not all(-_LARGE < one < _LARGE for one in words if type(one) is int):
            return None
        home = self._homes.name_of(value)
        is_own = home == name or (home is None and not self._homes.has(name))
        if not is_own or id(value) in self._numbers or self._name_of_part(value) is not None:
            return None
        self._numbers[id(value)] = number
        self._alive.append(value)
        tree = flat_dict(((TAG, "dict"), ("c", _NAME_OF_DICT), ("v", list(map(list, items)))))
        return Mark("dict", value, dict(items), {}), Lasting(tree, [value], number, self._homes.count)

    def write_again(self, last: Lasting) -> Any:
        """Return the same, of a value that has not changed; None if it is another tree in what is written now."""
        is_same = last.first == len(self._alive) and last.names == self._homes.count
        if not is_same or not self._numbers.keys().isdisjoint(numbers := list(map(id, last.objects))):
            return None
        self._numbers.update(zip(numbers, itertools.count(last.first), strict=False))
        self._alive += last.objects
        return last.tree

    def take_back(self) -> None:
        """Drop the value that was written last."""
        for one in self._alive[self._begun :]:
            del self._numbers[id(one)]
        del self._alive[self._begun :]

    def _write(self, name: str, value: Any, depth: int) -> Any:
        if (its_class := type(value)) in PLAIN or (its_class is tuple and PLAIN.issuperset(map(type, value))):
            return value
        if its_class not in _LASTING or (self._grows and len(value) > LONG):
            self._lasts = False
        kind = kind_of(value)
        if kind == "plain":
            return _constant(value)
        if kind == "number":
            return {TAG: "number", "v": value}
        if (part := self._name_of_part(value)) is not None:
            self._lasts = False
            return {TAG: "part", "p": part}
        if depth > DEEPEST:
            raise Unsupported("something that is nested too deep")
        if kind == "opaque":
            function = name_of_callable(value)
            if function is None or name.split(_SEPARATOR)[1:] == function.split(":"):  # the name that it has itself
                if is_fixed(value) and (home := self._homes.name_of(value)) is not None:
                    return {TAG: "own", "h": home}
                raise Unsupported(name_of(value) + _instead_of(value))
            return {TAG: "callable", "v": function}
        if not is_one_object(value):
            return self._contents(kind, name, value, depth)
        if depth and (holder := self._holders.get(id(value))) is not None:
            return {TAG: "holder", "k": holder}
        if (number := self._numbers.get(id(value))) is not None:
            self._lasts = self._lasts and number >= self._begun
            return {TAG: "same", "n": number}
        self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        tree = self._contents(kind, name, value, depth)
        home = self._homes.name_of(value)
        if home == name or (home is None and not self._homes.has(name)):
            return tree
        return {TAG: "new", "v": tree} if home is None else {TAG: "home", "h": home, "v": tree}

    def _name_of_part(self, value: Any) -> Any:
        try:
            return self._parts.name_of(value)
        except NotNameable as problem:
            raise Unsupported(str(problem)) from None

    def _check_key(self, key: Any) -> None:
        """Tensors and modules are found by their identity, which another process does not have."""
        if isinstance(key, (torch.Tensor, nn.Module)) and self._name_of_part(key) is None:
            raise Unsupported(f"{name_of(key)} as a key, which another process does not have (use its name)")

    def _contents(self, kind: str, name: str, value: Any, depth: int) -> Any:
        if kind in _CONTAINERS:
            tree = self._container(kind, name, value, depth)
            if own := attributes_beside(value):
                tree["a"] = self._write(f"{name}{STEP}", dict(own), depth + 1)
            return tree
        if kind == "tuple":
            return (
                tuple(self._each(name, value, depth))
                if type(value) is tuple
                else {TAG: "record", "c": class_name(value), "v": self._each(name, value, depth)}
            )
        if kind == "objects":
            return {TAG: "objects", "s": list(value.shape), "v": self._each(name, value.flat, depth)}
        if kind == "object":
            parts = [[part, self._write(f"{name}{STEP}{part}", one, depth + 1)] for part, one in members_of(value)]
            return {TAG: "object", "c": class_name(value), "v": parts}
        if kind in ("tensor", "array") and (buffer := self._buffers.of(value)) is not None:
            return write_view(value, buffer)
        if kind == "tensor" and is_distributed(value):
            return self._divided(value)
        if kind == "tensor" and (shared := self._memories.of(value)) is not None:
            return self._shared(value, shared)
        tree = _WRITERS[kind](value)
        if kind == "tensor" and (own := attributes_beside(value)):
            tree["a"] = self._write(f"{name}{STEP}", dict(own), depth + 1)
        return tree

    def _each(self, name: str, members: Iterable[Any], depth: int) -> list[Any]:
        found = list(members)
        if PLAIN.issuperset(map(type, found)):
            return found
        return [self._write(f"{name}{STEP}{index}", one, depth + 1) for index, one in enumerate(found)]

    def _container(self, kind: str, name: str, value: Any, depth: int) -> Any:
        if kind == "dict":
            pairs: list[list[Any]] = []
            for index, (key, one) in enumerate(items_of(value)):
                self._lasts = self._lasts and type(key) is str  # a mark takes 1 and True for the same key
                if type(key) in PLAIN and type(one) in PLAIN:
                    pairs.append([key, one])
                    continue
                self._check_key(key)
                at = self._write("", key, depth + 1)
                pairs.append([at, self._write(f"{name}{STEP}{label_of(index, key)}", one, depth + 1)])
            factory = factory_of(value)
            more = {} if factory is None else {"f": name_of_callable(factory) or ""}
            if more.get("f") == "" and not self._homes.has(name):
                raise Unsupported("a defaultdict whose function has no name")
            return {TAG: kind, "c": class_name(value), "v": pairs, **more}
        members = list(members_in(kind, value))
        if kind == "set":
            for one in members:
                self._check_key(one)
        written = self._each(name, members, depth)
        if type(value) is list:
            return written
        more = {"n": value.maxlen} if kind == "deque" else {}
        return {TAG: kind, "c": class_name(value), "v": written, **more}

    def _divided(self, value: torch.Tensor) -> Any:
        """A DTensor: the part of this rank, and how it is divided."""
        if value.requires_grad and value.is_leaf:
            raise Unsupported("a DTensor that requires a gradient and is no parameter that was handed over")
        if not is_on_mesh_of_any(value, (one for _, one in self._parts.owners())):
            raise Unsupported("a DTensor on another mesh than the parameters that were handed over")
        return {TAG: "divided", "v": local_part(value).clone(), "a": describe_division(value)}

    def _shared(self, value: torch.Tensor, memory: Memory) -> Any:
        """A view of memory that other tensors see too; the memory itself comes with the first of these."""
        node = {
            TAG: "shared",
            "m": memory.number,
            "a": [list(value.shape), list(value.stride()), value.storage_offset() - memory.first],
            "g": value.requires_grad and value.is_leaf,
        }
        if memory.number not in self._written_memories:
            self._written_memories.add(memory.number)
            home = self._homes.name_of(memory.widest) if memory.is_covered else None
            node |= {"v": memory.contents(), "h": home or ""}
        return node


def _instead_of(value: Any) -> str:
    """A value that can be carried in place of one that cannot."""
    return ", of which it could hold the state_dict() instead" if isinstance(value, nn.Module) else ""


def write_down(value: Any) -> Any:
    """One value by itself, as a tree for `encode_tree`. Raises Unsupported."""
    return Writer(Homes()).write("", value)


def _write_tensor(value: torch.Tensor) -> Any:
    is_own = type(value) not in (torch.Tensor, nn.Parameter)
    if value.layout is not torch.strided or value.is_quantized or (is_own and not is_user_type(type(value))):
        raise Unsupported(f"a {type(value).__name__} of layout {value.layout}")
    leaf = value.requires_grad and value.is_leaf
    node = {TAG: "tensor", "g": leaf, "v": value.detach().as_subclass(torch.Tensor).clone()}
    if is_own:
        node["c"] = class_name(value)
    if (gradient := gradient_of(value)) is not None:
        node["r"] = gradient.detach().clone()
    return node if value.is_contiguous() else {**node, "s": list(value.stride())}


def _write_array(value: Any) -> Any:
    import numpy as np

    if value.dtype.hasobject:
        raise Unsupported(f"a NumPy array of {value.dtype}")
    order = [] if value.flags.c_contiguous else [int(axis) for axis in np.argsort([-step for step in value.strides])]
    # "b": a view of memory that nothing else which is carried has
    more: dict[str, Any] = {} if value.base is None else {"b": True}
    if type(value) is not np.ndarray:  # of records, or a matrix
        more["c"], value = type(value).__name__, np.asarray(value)
    return {TAG: "array", "v": value, **more, **({"s": order} if order else {})}


def _write_generator(generator: Any) -> Any:
    state = generator_state(generator)
    if isinstance(generator, random.Random):  # of hundreds of words
        version, words, gauss = drawn = state["state"] if isinstance(state, dict) else state
        drawn = version, array("I", words).tobytes(), gauss
        state = {**state, "state": drawn} if isinstance(state, dict) else drawn
    if isinstance(state, str) and counter_of(state) is None:
        raise Unsupported(f"a counter that stands at {state}")
    return {TAG: "generator", "c": type(generator).__name__, "v": state}


_WRITERS: dict[str, Any] = {
    "stream": lambda value: {TAG: "stream", "c": type(value).__name__, "v": stream_state(value)},
    "tensor": _write_tensor,
    "array": _write_array,
    "generator": _write_generator,
    "cells": lambda value: {TAG: "cells", "c": class_name(value), "v": cells_state(value)},
    "bytearray": lambda value: {TAG: "bytearray", "c": getattr(value, "typecode", ""), "v": bytes(value)},
}


def _constant(value: Any) -> Any:
    written = write_constant(value)
    if written is None and (kind := name_of_callable(value)) is not None:
        return {TAG: "callable", "v": kind}
    if written is None:
        raise Unsupported(name_of(value))
    return {TAG: "constant", "c": written[0], "v": written[1]}
