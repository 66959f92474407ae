"""Kinds of values that scripts keep from step to step, and the members of each, read without methods of the user's."""

import functools
import io
import itertools
import random
import types
import weakref
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from threading import Lock, RLock, local
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from relight.script_files import WordsOfClasses, is_user_type
from relight.training.state.values.cells import is_type_of_cells
from relight.training.torch_private.distributed.mesh import is_distributed
from relight.training.torch_private.modules import attributes_of_layer, empty_layer, is_layer_class, is_stateless
from relight.training.torch_private.tensors import is_plain_memory
from relight.transfer.io.constants import callable_of, is_constant_type

PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS: dict[str, tuple[type, ...]] = {
    "list": (list,),
    "deque": (deque,),
    "dict": (dict, OrderedDict, defaultdict, Counter),
    "set": (set, frozenset),
}
HOLDERS = ("list", "tuple", "dict", "deque")  # kinds of containers whose members may be objects
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, deque, set, frozenset, tuple)
_BASES_OF: dict[type, Any] = {**{base: base for base in _BASES}, defaultdict: dict, Counter: dict}
STREAMS: tuple[type, ...] = (io.StringIO, io.BytesIO)
_WITHOUT = frozenset({torch.Tensor, nn.Parameter, list, deque, dict, defaultdict, Counter, set, frozenset})
_COUNTING = (torch.Generator, itertools.count)


class OfProcess:
    """Objects that each process has for itself, and that hold nothing of the script's: relight's own."""


_FIXED = (
    OfProcess,
    functools.partial,
    types.FunctionType,
    types.MethodType,
    weakref.ref,
    weakref.ProxyType,
    type(Lock()),
    type(RLock()),
    DeviceMesh,
    dist.ProcessGroup,
)
_LIKE_CONTAINERS = frozenset({ChainMap, UserDict, UserList})  # whose contents lie in an attribute
# Classes of libraries that are made of their attributes
_LIKE_OWN = ("argparse", "torch.distributed.algorithms.model_averaging.", "torch.utils.data.dataset")
_LOOKED_INTO = 4  # containers, one inside another
_MOST = 512  # items of one
_NOTHING = object()
_NO_SLOTS = frozenset({"__dict__", "__weakref__"})
_WORD_BYTES = object.__basicsize__ // 2
_kinds = WordsOfClasses()


def kind_of(value: Any) -> str:
    """The kind of a value; "opaque" is one that cannot be carried."""
    kind = type(value)
    found = _kinds.found.get(id(kind))
    if found is None:
        found = _kinds.put(kind, kind_of_type(kind))
    if found == "layer":
        return "object" if is_stateless(value) else "opaque"
    if found == "tensor":
        return found if is_plain_memory(value) or is_distributed(value) else "opaque"
    return "objects" if found == "array" and value.dtype.kind == "O" and value.ndim else found


def kind_of_type(kind: type) -> str:
    """The kind of the values of a class; those of a "layer" are objects or opaque, each by itself."""
    if kind in PLAIN or is_constant_type(kind):
        return "plain"
    if issubclass(kind, torch.Tensor):
        return "tensor"
    if kind.__module__.partition(".")[0] == "numpy":
        return _kind_of_numpy(kind)
    if issubclass(kind, tuple):
        return "tuple"
    for name, base in _CONTAINERS.items():
        if issubclass(kind, base) and (kind in base or is_user_type(kind)):
            return name
    if kind is bytearray or kind is array:
        return "bytearray"
    if is_type_of_cells(kind):
        return "cells"
    if kind in _COUNTING or (issubclass(kind, random.Random) and kind is not random.SystemRandom):
        return "generator"
    if kind in STREAMS:
        return "stream"
    if is_layer_class(kind):
        return "layer"
    return "object" if _is_plain_class(kind) else "opaque"


def _kind_of_numpy(kind: type) -> str:
    import numpy as np

    if issubclass(kind, np.generic):
        is_plain = issubclass(kind, (np.number, np.bool_, np.character, np.datetime64))
        return "number" if is_plain else "opaque"
    if kind in (np.ndarray, np.recarray, np.matrix):
        return "array"
    generators = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, np.random.SeedSequence)
    return "generator" if issubclass(kind, generators) else "opaque"


def is_found_by_name(its_class: Any) -> bool:
    """Return whether another process finds this very class by its name."""
    return callable_of(f"{its_class.__module__}:{its_class.__qualname__}") is its_class


def is_fixed(value: Any) -> bool:
    """Return whether it holds nothing that a step could change: each process has its own."""
    return issubclass(type(value), _FIXED)


def _is_plain_class(kind: type) -> bool:
    """Return whether all that an object of this class is lies in its attributes."""
    if issubclass(kind, (nn.Module, torch.optim.Optimizer, BaseException, type, types.ModuleType)):
        return False
    is_own = is_user_type(kind) or kind.__module__.startswith(_LIKE_OWN) or kind is types.SimpleNamespace
    is_own |= kind in _LIKE_CONTAINERS
    is_own |= issubclass(kind, (torch.distributions.Distribution, torch.quasirandom.SobolEngine))
    has_room = kind.__dictoffset__ != 0 or any("__slots__" in vars(base) for base in kind.__mro__[:-1])
    return issubclass(kind, local) or (is_own and has_room and not _has_memory_in_c(kind))


def _has_memory_in_c(kind: type) -> bool:
    """Return whether an object has memory beside its attributes: its class comes from one that is written in C."""
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    words = sum(name not in _NO_SLOTS for name in names) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + words * _WORD_BYTES or kind.__itemsize__ > 0


def made_of(kind: Any) -> Any:
    """Make an object of a class without calling code of the class: what that wants is not known."""
    if is_layer_class(kind):
        return empty_layer(kind)
    try:
        return object.__new__(kind)
    except TypeError:  # it has memory of C: types.SimpleNamespace
        return kind.__new__(kind)


def attributes_of(value: Any) -> dict[str, Any]:
    """The memory of an object of a plain class."""
    if issubclass(type(value), nn.Module):  # `isinstance` asks the object for its class
        return attributes_of_layer(value)
    found = dict(_stored(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            is_hidden = slot.startswith("__") and not slot.endswith("__")
            name = f"_{base.__name__.lstrip('_')}{slot}" if is_hidden else slot
            if name not in ("__dict__", "__weakref__") and (held := _stored(value, name, _NOTHING)) is not _NOTHING:
                found[name] = held
    return found


def factory_of(value: Any) -> Any:
    """Return what makes the missing values of a defaultdict; None of other dicts, whose `__getattr__` is not asked."""
    return value.default_factory if isinstance(value, defaultdict) else None


def _stored(value: Any, name: str, otherwise: Any) -> Any:
    """Return an attribute that is in the memory of an object, without code of its class, which may raise anything."""
    lookup: Any = local.__getattribute__ if issubclass(type(value), local) else object.__getattribute__
    try:
        return lookup(value, name)
    except AttributeError:
        return otherwise


def attributes_beside(value: Any) -> dict[str, Any]:
    """Attributes that a tensor or container has beside its contents: of a class of the user's, or of a state_dict()."""
    if type(value) in _WITHOUT:
        return {}
    found: dict[str, Any] = _stored(value, "__dict__", {})
    return {} if found is value else found


def base_of(value: Any) -> Any:
    """The class whose methods are not the user's."""
    return _BASES_OF.get(type(value)) or next(base for base in _BASES if isinstance(value, base))


def items_of(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Keys and values of a dict, without methods of the user's, as they are at one moment."""
    return _at_once(base_of(value).items, value)


def holds_words(value: Any) -> bool:
    """Return whether it is a list or dict of Python's own that holds nothing but plain values."""
    if type(value) is dict:
        return PLAIN.issuperset(map(type, list(value.values())))
    return type(value) is list and PLAIN.issuperset(map(type, value[:]))


def blocks_in(value: Any, kinds: Collection[str], depth: int = _LOOKED_INTO) -> Iterator[Any]:
    """The tensors or arrays, by their kinds, that a value consists of or holds."""
    kind = kind_of(value)
    if kind in kinds:
        yield value
    elif depth and kind in ("list", "tuple", "deque", "dict", "object", "objects"):
        members = members_in(kind, value)
        for one in () if PLAIN.issuperset(map(type, members)) else members:
            yield from blocks_in(one, kinds, depth - 1)


def can_be_carried(value: Any, depth: int = _LOOKED_INTO) -> bool:
    """Return whether a value, and what it holds, are of kinds that can be carried."""
    kind = kind_of(value)
    if depth and kind in ("list", "tuple", "deque", "set", "dict", "object", "objects"):
        return all(can_be_carried(one, depth - 1) for one in members_in(kind, value, _MOST))
    return kind != "opaque"


def members_in(kind: str, value: Any, most: int | None = None) -> list[Any]:
    """Members of a value of this kind, without methods of the user's, as they are at one moment.

    `most`: no more than so many of them.
    """
    if kind == "object":
        return list(attributes_of(value).values())[:most]
    return list(value.flat)[:most] if kind == "objects" else first_of(value, most)


def first_of(value: Any, most: int | None) -> list[Any]:
    """Members of a container, of a dict its values, without methods of the user's, as they are at one moment."""
    base = base_of(value)
    return _at_once(base.values if issubclass(base, dict) else base.__iter__, value, most)


def _at_once(iterate: Callable[[Any], Iterable[Any]], value: Any, most: int | None = None) -> list[Any]:
    """Copy what a method gives in one call, within which no other thread can change the value."""
    return list(itertools.islice(itertools.chain.from_iterable(map(iterate, (value,))), most))


def refill(mapping: dict[Any, Any], items: Iterable[tuple[Any, Any]]) -> None:
    """Give a dict these items instead of its own, without methods of the user's."""
    base = base_of(mapping)
    base.clear(mapping)
    for key, value in items:
        base.__setitem__(mapping, key, value)


def fill(objects: Any, members: Iterable[Any]) -> None:
    """Put objects into a NumPy array of objects, in its order."""
    import numpy as np

    for index, one in zip(np.ndindex(objects.shape), members, strict=True):
        objects[index] = one
