"""Values that are carried, written down as trees of plain values and tensors, and read back in another process."""

import random
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import nn

from relight.training.carried.values import (
    DEEPEST,
    DICTS,
    PLAIN,
    attributes_of,
    generator_state,
    kind_of,
    kind_of_type,
    set_generator_state,
)

TAG = "\x01"


class Unsupported(Exception):
    """A value of a kind that cannot be written down. The message names the kind."""


def write_down(value: Any, depth: int = 0) -> Any:
    """As a tree for `encode_tree`. Raises Unsupported."""
    kind = kind_of(value)
    if kind == "plain":
        if type(value) in PLAIN:
            return value
        return _constant(value)
    if depth > DEEPEST:
        raise Unsupported("something that holds itself, or is nested too deep")
    if kind == "tensor":
        return _tensor(value)
    if kind == "list":
        return [write_down(one, depth + 1) for one in value]
    if kind == "tuple":
        parts = [write_down(one, depth + 1) for one in value]
        return tuple(parts) if type(value) is tuple else {TAG: "record", "c": _class_name(value), "v": parts}
    if kind == "dict":
        pairs = [[write_down(key, depth + 1), write_down(one, depth + 1)] for key, one in value.items()]
        return {TAG: "dict", "c": type(value).__name__, "v": pairs}
    if kind == "set":
        kept = [write_down(one, depth + 1) for one in value]
        return {TAG: "set", "c": type(value).__name__, "v": kept}
    if kind == "deque":
        return {TAG: "deque", "n": value.maxlen, "v": [write_down(one, depth + 1) for one in value]}
    if kind == "object":
        parts_of = {name: write_down(one, depth + 1) for name, one in attributes_of(value).items()}
        return {TAG: "object", "c": _class_name(value), "v": list(parts_of.items())}
    if kind == "generator":
        return {TAG: "generator", "c": type(value).__name__, "v": _packed(value)}
    if kind == "number":
        return {TAG: "number", "v": value}
    if kind == "array":
        if value.dtype.kind not in "biufc":
            raise Unsupported(f"a NumPy array of {value.dtype}")
        return {TAG: "array", "v": value}
    if kind == "bytearray":
        return {TAG: "bytearray", "v": bytes(value)}
    raise Unsupported(name_of(value))


def _tensor(value: torch.Tensor) -> Any:
    if value.layout is not torch.strided or value.is_quantized or type(value) not in (torch.Tensor, nn.Parameter):
        raise Unsupported(f"a {type(value).__name__} of layout {value.layout}")
    leaf = value.requires_grad and value.is_leaf
    return {TAG: "tensor", "d": value.device.type, "g": leaf, "v": value.detach().clone()}


def _constant(value: Any) -> Any:
    if isinstance(value, complex):
        return {TAG: "complex", "v": (value.real, value.imag)}
    if isinstance(value, torch.Size):
        return {TAG: "size", "v": list(value)}
    raise Unsupported(name_of(value))


def name_of(value: Any) -> str:
    """A value's kind, as a message names it."""
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _packed(generator: Any) -> Any:
    state = generator_state(generator)
    if isinstance(generator, random.Random):  # of hundreds of words
        version, words, gauss = state
        return version, array("I", words).tobytes(), gauss
    return state


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def size_of(tree: Any) -> int:
    """About how many bytes a tree takes."""
    if isinstance(tree, dict):
        return 32 + sum(16 + size_of(one) for one in tree.values())
    if isinstance(tree, (list, tuple)):
        return 8 + sum(map(size_of, tree))
    if isinstance(tree, (str, bytes)):
        return 8 + len(tree)
    return 16 + int(getattr(tree, "nbytes", 0))


def leaves_of(tree: Any) -> int:
    """How many values a tree holds."""
    if isinstance(tree, dict):
        return sum(map(leaves_of, tree.values()))
    return sum(map(leaves_of, tree)) if isinstance(tree, (list, tuple)) else 1


def read_back(tree: Any, old: Any, *, in_place: bool) -> Any:
    """The value that a tree tells of. `in_place`: put into `old`, the object that is there now, if that can be done."""
    if isinstance(tree, list):
        made = [read_back(one, None, in_place=False) for one in tree]
        if in_place and type(old) is list:
            for index, (one, there) in enumerate(zip(tree, old, strict=False)):
                if _is_kept(one, there):
                    made[index] = read_back(one, there, in_place=True)
            old[:] = made
            return old
        return made
    if isinstance(tree, tuple):
        return tuple(read_back(one, None, in_place=False) for one in tree)
    if not isinstance(tree, dict):
        return tree
    return _READERS[tree[TAG]](tree, old if in_place else None)


def _is_kept(tree: Any, old: Any) -> bool:
    """Whether an object inside a container keeps its identity."""
    return isinstance(tree, dict) and tree[TAG] in ("object", "generator") and kind_of(old) == tree[TAG]


def _read_tensor(tree: Any, old: Any) -> torch.Tensor:
    value: torch.Tensor = tree["v"]
    fits = isinstance(old, torch.Tensor) and old.shape == value.shape and old.dtype == value.dtype
    if fits and not old.is_inference():
        with torch.no_grad():
            old.copy_(value)
        return old  # type: ignore[no-any-return]
    made = value.to(tree["d"])
    return made.requires_grad_() if tree["g"] else made


def _read_dict(tree: Any, old: Any) -> Any:
    pairs = [(read_back(key, None, in_place=False), one) for key, one in tree["v"]]
    if type(old) in DICTS:
        values = {k: read_back(one, old.get(k), in_place=_is_kept(one, old.get(k))) for k, one in pairs}
        dict.clear(old)
        dict.update(old, values)
        if isinstance(old, OrderedDict):
            old.clear()
            for key, one in values.items():
                old[key] = one
        return old
    values = {k: read_back(one, None, in_place=False) for k, one in pairs}
    kind = tree["c"]
    if kind == "defaultdict":
        return defaultdict(None, values)
    return {"OrderedDict": OrderedDict, "Counter": Counter}.get(kind, dict)(values)


def _read_set(tree: Any, old: Any) -> Any:
    values = [read_back(one, None, in_place=False) for one in tree["v"]]
    if tree["c"] == "frozenset":
        return frozenset(values)
    if type(old) is set:
        old.clear()
        old.update(values)
        return old
    return set(values)


def _read_deque(tree: Any, old: Any) -> Any:
    values = [read_back(one, None, in_place=False) for one in tree["v"]]
    if type(old) is deque and old.maxlen == tree["n"]:
        old.clear()
        old.extend(values)
        return old
    return deque(values, tree["n"])


def _read_object(tree: Any, old: Any) -> Any:
    made = old if kind_of(old) == "object" else object.__new__(_class_of(tree["c"]))
    there = attributes_of(made)
    values = dict(tree["v"])
    for name in there.keys() - values.keys():
        object.__delattr__(made, name)
    for name, one in values.items():
        held = there.get(name)
        object.__setattr__(made, name, read_back(one, held, in_place=_is_kept(one, held)))
    return made


def _read_generator(tree: Any, old: Any) -> Any:
    state, kind = tree["v"], tree["c"]
    if type(old).__name__ != kind:
        old = _new_generator(kind, state)
    if isinstance(old, random.Random):
        version, words, gauss = state
        state = version, tuple(array("I", words)), gauss
    set_generator_state(old, state)
    return old


def _new_generator(kind: str, state: Any) -> Any:
    if kind in ("Generator", "RandomState"):
        if isinstance(state, torch.Tensor):
            return torch.Generator()
        import numpy as np

        if kind == "RandomState":
            return np.random.RandomState()
        return np.random.Generator(getattr(np.random, state["bit_generator"])())
    return random.Random()


def _class_of(name: str) -> type:
    """A class that this process has already, by its name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or kind_of_type(found) not in ("object", "tuple"):
        raise Unsupported(f"a {name}, which this process does not have")
    return found


_READERS: dict[str, Any] = {
    "tensor": _read_tensor,
    "dict": _read_dict,
    "set": _read_set,
    "deque": _read_deque,
    "object": _read_object,
    "generator": _read_generator,
    "record": lambda tree, _: _class_of(tree["c"])(*[read_back(one, None, in_place=False) for one in tree["v"]]),
    "number": lambda tree, _: tree["v"][()],
    "array": lambda tree, old: _read_array(tree["v"], old),
    "bytearray": lambda tree, old: _read_bytes(tree["v"], old),
    "complex": lambda tree, _: complex(*tree["v"]),
    "size": lambda tree, _: torch.Size(tree["v"]),
}


def _read_array(value: Any, old: Any) -> Any:
    if old is not None and getattr(old, "shape", None) == value.shape and old.dtype == value.dtype:
        old[...] = value
        return old
    return value


def _read_bytes(value: bytes, old: Any) -> bytearray:
    if isinstance(old, bytearray):
        old[:] = value
        return old
    return bytearray(value)
