"""Values that are carried, written down as trees of plain values and tensors, and read back in another process.

Objects that several names share, or several places of one value, are one object again there. Those with which the
script began (its *homes*: the list that was made before the loop, and is filled in it) are the other process's own
homes, so that names which are not carried see them too.
"""

import random
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from relight.training.carried.constants import callable_of, name_of_callable, read_constant, write_constant
from relight.training.carried.memories import Memories, Memory
from relight.training.carried.parts import NoParts, Parts
from relight.training.carried.strides import overlaps, with_strides
from relight.training.carried.values import (
    DEEPEST,
    PLAIN,
    STREAMS,
    Mark,
    attributes_of,
    generator_state,
    gradient_of,
    kind_of,
    kind_of_type,
    set_generator_state,
    set_stream_state,
    stream_state,
)
from relight.training.state.references import NotNameable

TAG = "\x01"
_FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, deque)}
_OBJECTS = frozenset({"list", "dict", "set", "deque", "object", "generator", "array", "bytearray", "tensor", "stream"})
_SEPARATOR = "\x1f"  # between the parts of a place
_STREAMS = {kind.__name__: kind for kind in STREAMS}
_STEP = "\x1e"  # between the parts of a home's name


class Unsupported(Exception):
    """A value of a kind that cannot be written down. The message names the kind."""


def is_one_object(value: Any) -> bool:
    """Whether it matters that a value is this very object: it can change."""
    return kind_of(value) in _OBJECTS and not isinstance(value, frozenset)


def members_of(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds, with names that are the same in every process."""
    kind = kind_of(value)
    if kind in ("list", "tuple", "deque"):
        yield from ((str(index), one) for index, one in enumerate(value))
    elif kind == "dict":
        yield from ((_label(index, key), one) for index, (key, one) in enumerate(value.items()))
    elif kind == "object":
        yield from attributes_of(value).items()


def _label(index: int, key: Any) -> str:
    """Of a dictionary's key: it shall be the same in another process."""
    return f"#{index}" if isinstance(key, (torch.Tensor, nn.Module)) else repr(key)


def _remembered(mark: Mark) -> Iterator[tuple[str, Any]]:
    """The same of a value that was remembered, as it was then."""
    if mark.kind in ("list", "tuple", "deque"):
        yield from ((str(index), one) for index, one in enumerate(mark.saved))
    elif mark.kind == "dict":
        yield from ((_label(index, key), one) for index, (key, one) in enumerate(mark.saved))
    elif mark.kind == "object":
        yield from mark.saved.items()


class Homes:
    """Objects that were at carried places, or in them, when those places were found: each by its name."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {}  # weak, where that can be: no old value lives on for this

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """A value, or the mark of one, and all that it holds. What has a name keeps it."""
        thing = value.value if isinstance(value, Mark) else value
        if depth > DEEPEST or name in self._objects:
            return
        if is_one_object(thing):
            if id(thing) in self._names:
                return
            self._names[id(thing)] = name
            self._objects[name] = self._reference(thing)
        for step, one in _remembered(value) if isinstance(value, Mark) else members_of(thing):
            if isinstance(one, Mark) or kind_of(one) not in ("plain", "number", "opaque"):
                self.add(f"{name}{_STEP}{step}", one, depth + 1)

    def name_of(self, value: Any) -> str | None:
        """None: it is none of them."""
        return self._names.get(id(value))

    def has(self, name: str) -> bool:
        """Whether there was one of this name; it may be gone."""
        return name in self._objects

    def at(self, name: str) -> Any:
        """None if there is none of this name."""
        found = self._objects.get(name)
        return found() if isinstance(found, weakref.ref) else found

    def _reference(self, value: Any) -> Any:
        number, names = id(value), self._names
        try:
            return weakref.ref(value, lambda _: names.pop(number, None))
        except TypeError:  # lists and dictionaries
            return value


# --- writing ---------------------------------------------------------------------------------------------------
class Writer:
    """Writes down the values of one moment, which may share objects."""

    def __init__(self, homes: Homes, parts: Parts | None = None) -> None:
        self._homes = homes
        self._parts = parts or NoParts()
        self._numbers: dict[int, int] = {}  # of objects that were written, in that order
        self._alive: list[Any] = []
        self._begun = 0
        self._memories = Memories(self._parts)
        self._written_memories: set[int] = set()

    def look_at(self, value: Any) -> None:
        """To be called with all that will be written: tensors that share memory do so again where they are read."""
        self._memories.add(value)

    def write(self, name: str, value: Any) -> Any:
        """As a tree for `encode_tree`. Raises Unsupported."""
        self._begun = len(self._alive)
        try:
            return self._write(name, value, 0)
        except Unsupported:
            self.take_back()
            raise

    def take_back(self) -> None:
        """What was written last is not to be read."""
        for one in self._alive[self._begun :]:
            del self._numbers[id(one)]
        del self._alive[self._begun :]

    def _write(self, name: str, value: Any, depth: int) -> Any:
        kind = kind_of(value)
        if kind == "plain":
            return value if type(value) in PLAIN else _constant(value)
        if kind == "number":
            return {TAG: "number", "v": value}
        if (part := self._name_of_part(value)) is not None:
            return {TAG: "part", "p": part}
        if depth > DEEPEST:
            raise Unsupported("something that is nested too deep")
        if kind == "opaque":
            function = name_of_callable(value)
            if function is None or name.split(_SEPARATOR)[1:] == function.split(":"):  # the name that it has itself
                raise Unsupported(name_of(value))
            return {TAG: "callable", "v": function}
        if not is_one_object(value):
            return self._contents(kind, name, value, depth)
        if (number := self._numbers.get(id(value))) is not None:
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
        def each(members: Any) -> list[Any]:
            return [self._write(f"{name}{_STEP}{index}", one, depth + 1) for index, one in enumerate(members)]

        if kind == "list":
            return each(value)
        if kind == "tuple":
            return (
                tuple(each(value))
                if type(value) is tuple
                else {TAG: "record", "c": _class_name(value), "v": each(value)}
            )
        if kind == "deque":
            return {TAG: "deque", "n": value.maxlen, "v": each(value)}
        if kind == "set":
            for one in value:
                self._check_key(one)
            return {TAG: "set", "c": type(value).__name__, "v": each(value)}
        if kind == "dict":
            for key in value:
                self._check_key(key)
            pairs = [
                [self._write("", key, depth + 1), self._write(f"{name}{_STEP}{_label(index, key)}", one, depth + 1)]
                for index, (key, one) in enumerate(value.items())
            ]
            factory = getattr(getattr(value, "default_factory", None), "__name__", "")
            more = {"f": factory} if factory else {}
            if type(value) is OrderedDict and vars(value):  # of a module's state_dict: versions
                more["a"] = self._write(f"{name}{_STEP}", dict(vars(value)), depth + 1)
            return {TAG: "dict", "c": type(value).__name__, "v": pairs, **more}
        if kind == "object":
            parts = [[part, self._write(f"{name}{_STEP}{part}", one, depth + 1)] for part, one in members_of(value)]
            return {TAG: "object", "c": _class_name(value), "v": parts}
        if kind == "tensor" and (shared := self._memories.of(value)) is not None:
            return self._shared(value, shared)
        return _WRITERS[kind](value)

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
            node |= {"v": memory.contents(), "d": value.device.type, "h": home or ""}
        return node


def write_down(value: Any) -> Any:
    """One value by itself, as a tree for `encode_tree`. Raises Unsupported."""
    return Writer(Homes()).write("", value)


def _write_tensor(value: torch.Tensor) -> Any:
    if value.layout is not torch.strided or value.is_quantized or type(value) not in (torch.Tensor, nn.Parameter):
        raise Unsupported(f"a {type(value).__name__} of layout {value.layout}")
    leaf = value.requires_grad and value.is_leaf
    node = {TAG: "tensor", "d": value.device.type, "g": leaf, "v": value.detach().clone()}
    if (gradient := gradient_of(value)) is not None:
        node["r"] = gradient.detach().clone()
    return node if value.is_contiguous() else {**node, "s": list(value.stride())}


def _write_array(value: Any) -> Any:
    import numpy as np

    if value.dtype.kind not in "biufc":
        raise Unsupported(f"a NumPy array of {value.dtype}")
    order = [] if value.flags.c_contiguous else [int(axis) for axis in np.argsort([-step for step in value.strides])]
    return {TAG: "array", "v": value, **({"s": order} if order else {})}


def _write_generator(generator: Any) -> Any:
    state = generator_state(generator)
    if isinstance(generator, random.Random):  # of hundreds of words
        version, words, gauss = state
        state = version, array("I", words).tobytes(), gauss
    return {TAG: "generator", "c": type(generator).__name__, "v": state}


_WRITERS: dict[str, Any] = {
    "stream": lambda value: {TAG: "stream", "c": type(value).__name__, "v": stream_state(value)},
    "tensor": _write_tensor,
    "array": _write_array,
    "generator": _write_generator,
    "bytearray": lambda value: {TAG: "bytearray", "v": bytes(value)},
}


def _constant(value: Any) -> Any:
    written = write_constant(value)
    if written is None and (kind := name_of_callable(value)) is not None:
        return {TAG: "callable", "v": kind}
    if written is None:
        raise Unsupported(name_of(value))
    return {TAG: "constant", "c": written[0], "v": written[1]}


def name_of(value: Any) -> str:
    """A value's kind, as a message names it."""
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


# --- reading ---------------------------------------------------------------------------------------------------
class Reader:
    """Reads what one `Writer` wrote, in the same order."""

    def __init__(self, homes: Homes, parts: Parts | None = None) -> None:
        self._homes = homes
        self._parts = parts or NoParts()
        self._made: list[Any] = []  # each object that was read, by its number
        self._memories: dict[int, torch.Tensor] = {}  # that several tensors share, by its number

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
        if tag == "record":
            return _class_of(node["c"])(*self._each(name, node["v"]))
        if tag == "number":
            return node["v"][()]
        if tag == "constant":
            return _constant_of(node)
        if tag == "callable":
            return _callable_of(node["v"])
        if not is_placed:
            home = self._homes.at(name)
        if tag == "shared":
            self._made.append(self._view(node, home))
            return self._made[-1]
        if tag in _READERS:
            self._made.append(_READERS[tag](node, home))
            return self._made[-1]
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

    def _part(self, name: Any) -> Any:
        try:
            return self._parts.at(name)
        except LookupError as problem:
            raise Unsupported(str(problem)) from None

    def _each(self, name: str, trees: Any) -> list[Any]:
        return [self._read(f"{name}{_STEP}{index}", one) for index, one in enumerate(trees)]

    def _container(self, tag: str, name: str, tree: Any, home: Any) -> Any:
        """It may hold itself: it is there before what it holds is read."""
        if tag == "set" and tree["c"] == "frozenset":
            return frozenset(self._each(name, tree["v"]))
        made = home if _is_like(tag, tree, home) else _empty(tag, tree)
        self._made.append(made)
        if tag == "list":
            made[:] = self._each(name, tree)
        elif tag == "object":
            values = {part: self._read(f"{name}{_STEP}{part}", one) for part, one in tree["v"]}
            for part in attributes_of(made).keys() - values.keys():
                object.__delattr__(made, part)
            for part, one in values.items():
                object.__setattr__(made, part, one)
        elif tag == "dict":
            items = [
                (key := self._read("", at), self._read(f"{name}{_STEP}{_label(index, key)}", one))
                for index, (at, one) in enumerate(tree["v"])
            ]
            made.clear()
            for key, one in items:
                made[key] = one
            if "a" in tree:
                vars(made).update(self._read(f"{name}{_STEP}", tree["a"]))
        else:
            values_of = self._each(name, tree["v"])
            made.clear()
            (made.update if tag == "set" else made.extend)(values_of)
        return made


def _is_like(tag: str, tree: Any, home: Any) -> bool:
    """Whether an object can take on what a tree tells of."""
    if home is None or kind_of(home) != tag:
        return False
    if tag == "object":
        return _class_name(home) == str(tree["c"])
    if tag == "deque":
        return bool(home.maxlen == tree["n"])
    return tag == "list" or type(home).__name__ == tree["c"]


def _empty(tag: str, tree: Any) -> Any:
    if tag == "list":
        return []
    if tag == "deque":
        return deque(maxlen=tree["n"])
    if tag == "set":
        return set()
    if tag == "object":
        return object.__new__(_class_of(tree["c"]))
    if tree["c"] == "defaultdict":
        return defaultdict(_FACTORIES.get(tree.get("f", "")))
    return {"OrderedDict": OrderedDict, "Counter": Counter}.get(tree["c"], dict)()


def _memory_in(node: Any, home: Any) -> torch.Tensor:
    """The memory that a tree tells of: that of the object with which this process began, if it is as large."""
    contents: torch.Tensor = node["v"]
    if isinstance(home, torch.Tensor) and home.dtype == contents.dtype and home.is_contiguous():
        flat = home.detach().view(-1)
        if flat.shape == contents.shape and not home.is_inference():
            flat.copy_(contents)
            return flat
    return contents.to(node["d"])


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _read_tensor(tree: Any, old: Any) -> torch.Tensor:
    value: torch.Tensor = tree["v"]
    fits = isinstance(old, torch.Tensor) and old.shape == value.shape and old.dtype == value.dtype
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
    made = value.to(tree["d"])
    if "s" in tree:
        made = with_strides(made, tree["s"])
    if tree["g"]:
        made.requires_grad_().grad = tree.get("r")
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


def _read_array(tree: Any, old: Any) -> Any:
    import numpy as np

    value = tree["v"]
    if "s" in tree:  # the axes from the outermost in memory to the innermost
        made = np.empty([value.shape[axis] for axis in tree["s"]], value.dtype).transpose(np.argsort(tree["s"]))
        made[...] = value
        value = made
    fits = old is not None and getattr(old, "shape", None) == value.shape and old.dtype == value.dtype
    if fits and old.strides == value.strides:
        old[...] = value
        return old
    return value


def _read_bytes(tree: Any, old: Any) -> bytearray:
    made = old if isinstance(old, bytearray) else bytearray()
    made[:] = tree["v"]
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
    if not isinstance(found, type) or kind_of_type(found) not in ("object", "tuple"):
        raise Unsupported(f"a {name}, which this process does not have")
    return found


_READERS: dict[str, Any] = {
    "stream": _read_stream,
    "tensor": _read_tensor,
    "array": _read_array,
    "bytearray": _read_bytes,
    "generator": _read_generator,
}
