"""Find the random generators and the plain values that objects of the data hold, wherever they keep them.

Followed are attributes, small containers, closures, default arguments, and the globals that the code of classes and
functions of the script names. Modules of networks, tensors and arrays are not entered. Of objects of installed packages
only the generators count, which they hold as attributes.
"""

import dis
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch

from relight.script_files import is_script_module
from relight.training.torch_private.loaders import LOADER_ITERATOR
from relight.training.torch_private.tensors import is_plain_memory
from relight.transfer.io.constants import is_constant_type
from relight.transfer.io.typed import attributes_of

try:
    import numpy
except ImportError:  # torch does without
    numpy = None  # type: ignore[assignment]

__all__ = ["ABSENT", "GENERATORS", "Generator", "Place", "Reach", "numpy"]

_MOST_OBJECTS = 5_000
_MOST_ELEMENTS = 64  # of a container that is entered: transforms, not a list of files
_MOST_BYTES = 4096  # of a tensor that is compared with each batch
_DEEPEST = 3  # containers, one inside another
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_PLAIN = (bool, int, float, str, bytes, type(None))
_ENTERED = ("argparse", "collections", "dataclasses", "functools", "types")  # of Python's own, objects of these
_CLOSED = (
    torch.Tensor,
    *((numpy.ndarray,) if numpy else ()),
    torch.nn.Module,
    LOADER_ITERATOR,
    types.ModuleType,
    type,
    types.BuiltinFunctionType,
    types.GeneratorType,
    types.CodeType,
)

Generator = Any  # one of these
GENERATORS: tuple[type, ...] = (torch.Generator, random.Random)
_GLOBAL = [torch.default_generator, random._inst]
if numpy:
    GENERATORS += (numpy.random.Generator, numpy.random.RandomState, numpy.random.SeedSequence)
    _GLOBAL.append(numpy.random.mtrand._rand)


ABSENT = object()  # instead of a value, where there is none


def is_small(value: Any, depth: int = _DEEPEST) -> bool:
    """Return whether a value is plain, or a container or tensor that can be copied and compared with each batch."""
    if isinstance(value, _PLAIN) or is_constant_type(type(value)):
        return True
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and is_plain_memory(value) and value.nbytes <= _MOST_BYTES
    if numpy and isinstance(value, (numpy.ndarray, numpy.generic)):
        return not value.dtype.hasobject and value.nbytes <= _MOST_BYTES
    if depth and is_dataclass(value) and not isinstance(value, type):
        return all(is_small(one, depth - 1) for one in attributes_of(value).values())
    if not depth or not isinstance(value, _CONTAINERS) or len(value) > _MOST_ELEMENTS:
        return False
    members: Iterable[Any] = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return all(is_small(one, depth - 1) for one in members)


@dataclass(frozen=True)
class Place:
    """The place of a value: an item of a dict (attributes and globals are such), or the cell of a closure."""

    home: Any
    name: Any = ""

    def get(self) -> Any:
        """Return the value itself. It may change in place: `copied` keeps what it is now."""
        if isinstance(self.home, types.CellType):
            return self.home.cell_contents
        return self.home.get(self.name, ABSENT)

    def set(self, value: Any) -> None:
        if isinstance(self.home, types.CellType):
            self.home.cell_contents = value
        elif value is ABSENT:
            self.home.pop(self.name, None)
        else:
            self.home[self.name] = value


class Reach:
    """Objects that others lead to: `generators` and `values`, by a path that is the same in every process."""

    def __init__(self, roots: dict[str, Any], without: Iterable[Any] = ()) -> None:
        """`without`: objects that are not entered."""
        self.generators: dict[str, Generator] = {}
        self.values: dict[str, Place] = {}
        self._generators_at: dict[str, Place] = {}  # attributes and items that hold them
        self._homes: dict[str, dict[str, Any]] = {}  # attributes of objects of the script's own classes
        self._mixed: set[str] = set()  # dicts of which only some values can be copied
        self._seen = {id(generator) for generator in (*_GLOBAL, *without)}
        self._kept: list[Any] = []  # or the id of what is looked at might be given to another object
        queue = deque(roots.items())
        while queue and len(self._seen) < _MOST_OBJECTS:
            path, thing = queue.popleft()
            if isinstance(thing, _PLAIN) or is_constant_type(type(thing)) or id(thing) in self._seen:
                continue
            self._seen.add(id(thing))
            self._kept.append(thing)
            if isinstance(thing, GENERATORS):
                if not isinstance(thing, random.SystemRandom):
                    self.generators[path] = thing
            elif not isinstance(thing, _CLOSED):
                inside = list(self._inside(path, thing))
                queue.extend(inside)
                self._note_generators(thing, inside)
        self._kept.clear()

    def holds(self, thing: Any) -> bool:
        """Return whether it is one of these generators, or an object whose attributes were looked at."""
        if isinstance(thing, GENERATORS):
            return any(thing is generator for generator in self.generators.values())
        attributes = getattr(thing, "__dict__", None)
        return attributes is not None and any(attributes is home for home in self._homes.values())

    def _note_generators(self, holder: Any, inside: list[tuple[str, Any]]) -> None:
        home: Any = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        for path, thing in inside if isinstance(home, dict) else ():
            if isinstance(thing, GENERATORS):
                name = next((name for name, one in home.items() if one is thing), "")
                self._generators_at[path] = Place(home, name)

    def follow_generators(self) -> None:
        """See which generators are there now: reading an item may have put another one in the place of one."""
        for path, place in self._generators_at.items():
            if path in self.generators and isinstance(found := place.get(), GENERATORS):
                self.generators[path] = found

    def place(self, path: str) -> Place | None:
        """The place of an attribute, also of one that does not exist yet."""
        home, _, name = path.rpartition(".")
        return Place(self._homes[home], name) if home in self._homes else None

    def _inside(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, (list, tuple)):
            if len(thing) <= _MOST_ELEMENTS:
                yield from ((f"{path}[{index}]", each) for index, each in enumerate(thing))
        elif isinstance(thing, dict):
            if len(thing) <= _MOST_ELEMENTS:
                if path in self._mixed:
                    small = [key for key, one in thing.items() if is_small(one)]
                    self.values.update({f"{path}[{key!r}]": Place(thing, key) for key in small})
                yield from ((f"{path}[{key!r}]", each) for key, each in thing.items())
        elif isinstance(thing, types.FunctionType):
            yield from self._of_function(path, thing)
        elif isinstance(thing, types.MethodType):
            yield f"{path}.self", thing.__self__
            yield f"{path}.function", thing.__func__
        elif isinstance(thing, functools.partial):
            yield f"{path}.func", thing.func
            yield f"{path}.args", thing.args
            yield f"{path}.keywords", thing.keywords
        elif not _is_closed(type(thing).__module__ or ""):
            yield from self._of_instance(path, thing)

    def _of_instance(self, path: str, thing: Any) -> Iterator[tuple[str, Any]]:
        attributes = getattr(thing, "__dict__", None)
        is_own = is_script_module(type(thing).__module__ or "")
        if isinstance(attributes, dict):
            if is_own:
                self._homes[path] = attributes
            for name, value in list(attributes.items()):
                if is_own and is_small(value) and not _is_told(thing, name):
                    self.values[f"{path}.{name}"] = Place(attributes, name)
                elif is_own and isinstance(value, dict):
                    self._mixed.add(f"{path}.{name}")
                yield f"{path}.{name}", value
        for kind in type(thing).__mro__:
            if not is_script_module(kind.__module__ or ""):
                continue
            for name, value in vars(kind).items():
                yield f"{kind.__qualname__}.{name}", _function_of(value)

    def _of_function(self, path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        if not is_script_module(function.__module__ or ""):
            return
        read, written, written_here = _names_of(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if is_small(value) and (name in written_here or isinstance(value, _CONTAINERS)):
                self.values[f"{path}.{name}"] = Place(cell)
            yield f"{path}.{name}", value
        yield f"{path}.defaults", function.__defaults__
        yield f"{path}.defaults", function.__kwdefaults__
        module = function.__module__
        for name in written:
            if is_small(function.__globals__.get(name)):
                self.values[f"{module}.{name}"] = Place(function.__globals__, name)
        for name in read:
            value = function.__globals__.get(name)
            if isinstance(value, _CONTAINERS) and is_small(value):
                self.values[f"{module}.{name}"] = Place(function.__globals__, name)
        for name in read:
            if name in function.__globals__:
                yield f"{module}.{name}", function.__globals__[name]


@functools.cache
def _names_of(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Globals that code reads, globals that it assigns, and variables of outer functions that it assigns."""
    found: dict[str, list[str]] = {"LOAD_GLOBAL": [], "STORE_GLOBAL": [], "STORE_DEREF": []}
    for instruction in dis.get_instructions(code):
        if instruction.opname in found:
            found[instruction.opname].append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for names, inner in zip(found.values(), _names_of(constant), strict=True):
                names.extend(inner)
    read, written, written_here = (tuple(dict.fromkeys(names)) for names in found.values())
    return read, written, written_here


def _function_of(value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value if isinstance(value, types.FunctionType) else None


def _is_closed(module: str) -> bool:
    """Return whether objects of this module's classes are not entered at all: relight's, and most of Python's."""
    package = module.partition(".")[0]
    return package == "relight" or (package in sys.stdlib_module_names and package not in _ENTERED)


def _is_told(thing: Any, name: str) -> bool:
    """Return whether relight itself sets this attribute, when an epoch starts or a rank is taken over."""
    if name == "rank":
        return hasattr(thing, "num_replicas") or hasattr(thing, "world_size")
    return name == "epoch" and hasattr(thing, "set_epoch")
