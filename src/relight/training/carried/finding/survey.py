"""A look at everything that a running script can reach, to see by values what its code did not show."""

import enum
import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from relight.training.carried.code.refs import Place, is_added, is_own_optimizer
from relight.training.carried.finding.places import Spots
from relight.training.carried.values.parts import Parts, is_part
from relight.training.script_files import is_script_file, is_script_module, is_user_type
from relight.training.state.modules.attributes import WRAPPERS
from relight.training.state.modules.plain_values import plain_bytes
from relight.training.state.values.cells import cells_state
from relight.training.state.values.generators import generator_state, stream_state
from relight.training.state.values.kinds import attributes_of, items_of, kind_of, members_in
from relight.training.state.values.marks import Mark, gradient_of, remember
from relight.training.torch_private.modules import (
    OWN_ATTRIBUTES,
    buffers_in,
    hook_tables_of,
    modules_in,
    parameters_in,
)
from relight.training.torch_private.tensors import version_of

_DEEPEST = 12  # objects, one in another: environments in wrappers in a vector of an agent
_TRACED_DEEPEST = 4
_MOST = 5000  # places
_TRACED = 256  # of those of which no copy is kept
_TRACED_BYTES = 2**16
_LONGEST = 5000  # items of one container
_FEW = 512  # items of a container that is looked into one by one
_BYTES = 4 * 2**20  # of a larger tensor its version tells
_MOST_BYTES = 2**28  # copied by one survey
_OF_DATA = (DataLoader, Dataset, Sampler)


class Survey:
    """The values at each place now, with marks by which changes are seen, or traces, which hold no value."""

    def __init__(
        self,
        spots: Spots,
        is_foreign: Callable[[Any], bool],
        *,
        traces: bool = False,
        enters_data: bool = False,
        rebound: Collection[Place] = (),
    ) -> None:
        """Look at everything. An object that several names reach gets the place of one that steps do not rebind.

        Args:
            spots: where the names are.
            is_foreign: of an object that is not looked into.
            traces: whether no values are held.
            enters_data: whether loaders, samplers and datasets of libraries are looked into.
            rebound: names that steps bind to another object now and then.
        """
        self._is_foreign = is_foreign
        self._attributes_of = spots.own_attributes
        self._is_part = functools.partial(is_part, spots.parts)
        self._traces, self._enters_data = traces, enters_data
        self._left = _MOST_BYTES  # to be copied
        self.attributes: dict[Place, frozenset[str]] = {}  # of the objects at these places
        self.modules: dict[Place, Place] = {}  # of their tensors
        self._seen: set[int] = set()
        self._modules_seen: set[Any] = set(_modules_of(spots))
        self.found: dict[Place, Any] = {}
        self._ahead: deque[tuple[Place, Any, int]] = deque()  # what is near is looked at first
        names = list(_names(spots))
        self._look_at_all(named for named in names if named[0] not in rebound)
        self._look_at_all(named for named in names if named[0] in rebound)
        self._look_at_all(attributes_of_parts(spots.parts))
        self._look_at_all(_hooks_of_parts(spots.parts))
        for _, owner in spots.parts.owners():
            self._look_at_names(type(owner).__module__, 0)
        self._look_at_all(())
        for root, parameter in _parameters_of(spots.parts):
            self.attributes[(root,)] = frozenset(vars(parameter))

    def look(self, place: Place, value: Any) -> None:
        """Look at one more value, which the frames of the loop do not show."""
        self._look_at_all([(place, value)])

    def _look_at_all(self, named: Iterable[tuple[Place, Any]]) -> None:
        self._ahead.extend((place, value, 0) for place, value in named)
        while self._ahead and len(self.found) < _MOST:
            self._look(*self._ahead.popleft())
        self._ahead.clear()

    def _look_later(self, place: Place, value: Any, depth: int) -> None:
        if depth <= _DEEPEST:
            self._ahead.append((place, value, depth))

    def _look(self, place: Place, value: Any, depth: int) -> None:
        kind = kind_of(value)
        if kind in ("object", "opaque"):
            self._look_at_names(_module_of(value), depth)
        if isinstance(value, type) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._look_into_class(place, value, depth)
        if kind == "opaque" and self._traces and isinstance(value, (dict, list, set, deque)):
            self.found[place] = trace(
                value, self._is_part
            )  # of a class of its own: it cannot be carried, but its changes are seen
            return
        if kind == "opaque" and self._enters_data and isinstance(value, range):
            self.found[place] = value
            return
        if kind == "opaque":
            self._look_into_opaque(place, value, depth)
            return
        if self._is_foreign(value):
            return
        if kind == "object":
            self.found[place] = id(value) if self._traces else Mark("opaque", value, None)  # another may take its place
            if id(value) not in self._seen:
                self._seen.add(id(value))
                attributes = self._attributes_of(value)
                self.attributes[place] = frozenset(attributes)
                for name, one in attributes.items():
                    self._look_later((*place, ("attribute", name, "")), one, depth + 1)
            return
        if kind in ("list", "tuple", "dict", "deque") and holds_objects(value):
            if len(place) > 1:  # code may not show that another one is assigned there
                self.found[place] = id(value) if self._traces else Mark("opaque", value, None)
            if id(value) in self._seen or len(value) > _FEW:
                return
            self._seen.add(id(value))
            pairs = items_of(value) if kind == "dict" else enumerate(members_in(kind, value))
            for key, one in pairs:
                if type(key) in (int, str):
                    step = ("item", type(key).__name__, str(key))
                    self._look_later((*place, step), one, depth + 1)
            return
        self.found[place] = trace(value, self._is_part) if self._traces else self._glance(value)

    def _glance(self, value: Any) -> Any:
        """A mark that tells whether the value changes, and puts it back unless it is large."""
        kind = kind_of(value)
        if kind == "opaque" and isinstance(value, torch.Tensor):
            return Mark("version", value, None if value.is_inference() else version_of(value))
        if kind in ("tensor", "array"):
            is_copied = value.nbytes <= min(_BYTES, self._left)
            if kind == "tensor" and not is_copied:
                return Mark("version", value, None if value.is_inference() else version_of(value))
            if not is_copied:
                return Mark("version", value, None)
            self._left -= value.nbytes
        if kind in ("list", "tuple", "dict", "set", "deque", "objects") and len(value) > _LONGEST:
            return Mark("length", value, len(value))
        return remember(value, is_part=self._is_part)

    def _look_into_opaque(self, place: Place, value: Any, depth: int) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            for there, hook in _hooks_of(place, value):
                self._look_later(there, hook, depth + 1)
        if is_own_optimizer(value):
            self._seen.add(id(value))
            for name, one in vars(value).items():
                if is_added(name):
                    self._look_later((*place, ("attribute", name, "")), one, depth + 1)
            return
        if self._is_foreign(value):
            return
        self._seen.add(id(value))
        if self._enters_data and isinstance(value, _OF_DATA):
            for name, one in vars(value).items():
                if not name.startswith("_"):
                    self._look_later((*place, ("attribute", name, "")), one, depth + 1)
        if isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._look_later((*place, ("attribute", name, "")), getattr(value, name), depth + 1)
        if isinstance(value, types.MethodType):
            self._look_later((*place, ("attribute", "__self__", "")), value.__self__, depth + 1)
            value = value.__func__
        if isinstance(value, types.FunctionType) and is_script_file(value.__code__.co_filename):
            for name, one in vars(value).items():
                self._look_later((*place, ("attribute", name, "")), one, depth + 1)
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            for name, cell in cells:
                try:
                    self._look_later((*place, ("cell", name, "")), cell.cell_contents, depth + 1)
                except ValueError:
                    continue
        elif isinstance(value, nn.Module):
            if is_user_type(type(value)):
                for name, one in vars(value).items():
                    if not name.startswith("_"):
                        self._look_later((*place, ("attribute", name, "")), one, depth + 1)
            self._look_into_module(place, value)

    def _look_into_class(self, place: Place, kind: type, depth: int) -> None:
        """The values of its attributes, if the class is the user's own."""
        if not is_user_type(kind) or issubclass(kind, enum.Enum):
            return
        self.attributes[place] = frozenset(vars(kind))
        for name, one in list(vars(kind).items()):
            if not name.startswith("__"):
                self._look_later((*place, ("attribute", name, "")), one, depth + 1)

    def _look_at_names(self, module: Any, depth: int) -> None:
        """The names of a module that something here comes from, if it is the script's: code there may change them."""
        if module in self._modules_seen:
            return
        self._modules_seen.add(module)
        if module not in sys.modules or not is_script_module(module):
            return
        for name, value in list(vars(sys.modules[module]).items()):
            if not name.startswith("__"):
                self._look_later((("module", module, name),), value, depth + 1)

    def _look_into_module(self, place: Place, module: nn.Module) -> None:
        """Its tensors, also those of the modules in it that were not handed over."""
        for name, tensor in [*parameters_in(module).items(), *buffers_in(module).items()]:
            if tensor is not None and id(tensor) not in self._seen and not self._is_foreign(tensor):
                self._seen.add(id(tensor))
                there = (*place, ("attribute", name, ""))
                self.found[there] = trace(tensor, self._is_part) if self._traces else self._glance(tensor)
                self.modules[there] = place
        for name, inner in modules_in(module).items():
            if inner is not None and id(inner) not in self._seen and not self._is_foreign(inner):
                self._seen.add(id(inner))
                self._look_into_module((*place, ("attribute", name, "")), inner)


def _names(spots: Spots) -> Iterator[tuple[Place, Any]]:
    """Objects that an integration shows, local variables of the frames of the loop, then the names of their modules."""
    for shown, value in spots.shown.items():
        yield (("shown", "", shown),), value
    frames = spots.frames
    for number in range(len(frames.frames)):
        if frames.frames[number] is not None and not frames.names(number)[2]:
            for local, value in frames.read(number).items():
                yield (("frame", str(number), local),), value
    for name, names in _modules_of(spots).items():
        for one, value in list(names.items()):
            if not one.startswith("__"):
                yield (("module", name, one),), value


def _modules_of(spots: Spots) -> dict[str, dict[str, Any]]:
    """The names of the modules of the loop's frames."""
    found: dict[str, dict[str, Any]] = {}
    for number, frame in enumerate(spots.frames.frames):
        if frame is not None:
            name, names, _ = spots.frames.names(number)
            found.setdefault(name, names)
    return found


def _module_of(value: Any) -> Any:
    """The name of the module that something is, or was defined in."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    return getattr(value if isinstance(value, (type, types.FunctionType)) else type(value), "__module__", None)


def attributes_of_parts(parts: Parts) -> Iterator[tuple[Place, Any]]:
    """Values on modules and parameters that were handed over, less their own state."""
    for name, owner in parts.owners():
        is_module = isinstance(owner, nn.Module)
        if is_module and type(owner).__module__.startswith(WRAPPERS):
            continue
        root = "inner" if is_module else "slot"
        for attribute, value in list(vars(owner).items()):
            if attribute[0] != "_" and not (is_module and is_kept_with_modules(attribute, value)):
                yield ((root, name[1], name[2]), ("attribute", attribute, "")), value


def _hooks_of_parts(parts: Parts) -> Iterator[tuple[Place, Any]]:
    """Hooks on modules and parameters that were handed over: functions and objects that backward or forward calls."""
    for name, owner in parts.owners():
        root = "inner" if isinstance(owner, nn.Module) else "slot"
        yield from _hooks_of(((root, name[1], name[2]),), owner)


def _hooks_of(place: Place, owner: Any) -> Iterator[tuple[Place, Any]]:
    for table, hooks in hook_tables_of(owner):
        for number, hook in enumerate(list(hooks.values())):
            yield (*place, ("attribute", table, ""), ("member", str(number), "")), hook


def is_kept_with_modules(name: str, value: Any) -> bool:
    """Return whether an attribute of a module is kept with the module's own state. None may give way to an object."""
    if value is None:
        return False
    return name in OWN_ATTRIBUTES or isinstance(value, torch.Tensor) or plain_bytes(value) is not None


def _parameters_of(parts: Parts) -> Iterator[tuple[tuple[str, str, str], torch.Tensor]]:
    for name, owner in parts.owners():
        if isinstance(owner, torch.Tensor):
            yield ("slot", name[1], name[2]), owner


def _items(value: Any) -> Iterator[Any]:
    return itertools.islice(members_in(kind_of(value), value), _FEW)


def holds_objects(value: Any, depth: int = 2) -> bool:
    """Return whether a container, or containers in it, hold objects with attributes of their own."""
    for one in _items(value):
        kind = kind_of(one)
        if kind in ("object", "opaque"):
            return True
        if depth and kind in ("list", "tuple", "dict", "deque") and holds_objects(one, depth - 1):
            return True
    return False


def trace(value: Any, is_part: Callable[[Any], bool] = lambda _: False, depth: int = 0) -> Any:
    """A mark by which a later look at a value sees whether it is another one, or holds something else.

    `is_part`: of a tensor whose contents are kept otherwise: here it only matters that it is this one.
    """
    kind = kind_of(value)
    if kind in ("plain", "number"):
        return repr(value) if isinstance(value, (float, complex)) else value
    if kind == "tensor" and is_part(value):
        return id(value)
    if isinstance(value, torch.Tensor):
        gradient = gradient_of(value)
        own = None if gradient is None else (id(gradient), version_of(gradient))
        return id(value), -1 if value.is_inference() else version_of(value), own
    if kind == "array":
        return id(value), value.tobytes() if value.nbytes <= _TRACED_BYTES else b""
    if kind == "bytearray":
        return id(value), bytes(value)
    if kind == "cells":
        return id(value), cells_state(value)
    if kind == "generator":
        return id(value), repr(generator_state(value))
    if kind == "stream":
        return id(value), stream_state(value)
    if kind == "opaque" and isinstance(value, (dict, list, set, deque)):
        kind = "dict" if isinstance(value, dict) else "set" if isinstance(value, set) else "list"
    if kind == "opaque" or depth > _TRACED_DEEPEST or (kind != "object" and len(value) > _TRACED):
        return id(value), len(value) if hasattr(type(value), "__len__") and kind != "opaque" else 0
    if kind == "set":
        return id(value), frozenset(trace(one, is_part, depth + 1) for one in value)
    pairs: Iterable[tuple[Any, Any]]
    if kind == "object":
        pairs = attributes_of(value).items()
    else:
        pairs = items_of(value) if kind == "dict" else enumerate(members_in(kind, value))
    return id(value), tuple((name, trace(one, is_part, depth + 1)) for name, one in pairs)
