"""A look at everything that a running script can reach, to see by values what its code did not show."""

import contextlib
import enum
import functools
import itertools
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from relight.script_files import is_script_file, is_script_module, is_user_type
from relight.training.carried.code.refs import Place, is_added
from relight.training.carried.finding.looks import Look
from relight.training.carried.finding.places import Spots, step_to_item
from relight.training.carried.finding.spots.of_parts import (
    attributes_of_parts,
    hooks_of,
    hooks_of_parts,
    roots_of,
    uses_itself,
)
from relight.training.carried.finding.spots.outside import CONTENTS, contents_of
from relight.training.carried.finding.spots.spot import BOUND, around_function, defaults_of
from relight.training.carried.values.parts import is_part
from relight.training.state.values.contents import is_container
from relight.training.state.values.fingerprints import CACHED, has_fingerprint
from relight.training.state.values.iterators import has_position
from relight.training.state.values.kinds import HOLDERS, items_of, kind_of, members_in
from relight.training.torch_private.modules import (
    buffers_in,
    modules_in,
    parameters_in,
)
from relight.training.wrappers import is_loader
from relight.transfer.io.constants import name_of_callable

_DEEPEST = 12  # objects, one in another: environments in wrappers in a vector of an agent
_MOST = 5000  # places
_FEW = 512  # items of a container that is looked into one by one
_OF_DATA = (DataLoader, Dataset, Sampler)
_OF_WRAPPERS = ("_dataloader", "_num_iter_calls")  # of Fabric's loader: another one, and how often that was read
_SUMS = (torch.Tensor, list, dict)
_OF_MEMBERS = ("_name_", "__objclass__", "_sort_order_")  # which Python sets
_NAMED = (types.FunctionType, types.BuiltinFunctionType, type)


class Survey:
    """All places that can be reached now, with marks by which changes are seen."""

    def __init__(
        self,
        spots: Spots,
        is_foreign: Callable[[Any], bool],
        look: Look,
        *,
        enters_data: bool = False,
        rebound: Collection[Place] = (),
    ) -> None:
        """Look at everything. An object that several names reach gets the place of one that steps do not rebind.

        Args:
            spots: where the names are.
            is_foreign: of an object that is not looked into.
            look: leaves the marks.
            enters_data: whether loaders, samplers and datasets of libraries are looked into, and attributes of modules
                that are kept with these.
            rebound: names and attributes that steps bind to another object now and then.
        """
        self._is_foreign = is_foreign
        self._is_part = functools.partial(is_part, spots.parts)
        self._attributes_of = spots.own_attributes
        self._looks_into = spots.looks_into
        self._mark = look
        self._enters_data = enters_data
        self.attributes: dict[Place, frozenset[str]] = {}  # of the objects at these places
        self.modules: dict[Place, Place] = {}  # of their tensors
        self.names = {name: frozenset(names) for name, names in _modules_of(spots).items()}  # of the script's modules
        self.drawn: set[int] = set()  # by `id`, generators that loaders, samplers and datasets of libraries hold
        self._seen: set[int] = set()
        self._modules_seen: set[Any] = set(_modules_of(spots))
        self.found: dict[Place, Any] = {}
        self.homes: dict[int, Place] = {}  # of objects and containers whose parts were looked at, by `id`
        self.fingerprinted: dict[Place, Any] = {}  # objects that only a fingerprint shows to have changed
        self._ahead: deque[tuple[Place, Any, int]] = deque()  # what is near is looked at first
        names = list(_names(spots))
        self._rebound, self._postponed = rebound, list[tuple[Place, Any, int]]()
        self._look_at_all(named for named in names if named[0] not in rebound)
        self._rebound = ()
        self._ahead.extend(self._postponed)
        self._look_at_all(named for named in names if named[0] in rebound)
        self._look_at_all(spots.settings.all())
        self._look_at_all(attributes_of_parts(spots.parts, kept=enters_data))
        self._look_at_all(hooks_of_parts(spots.parts))
        self._look_at_all(((("optimizer", name, ""),), one) for name, one in spots.parts.optimizers())
        for _, owner in spots.parts.owners():
            self._look_at_names(type(owner).__module__, 0)
        self._look_at_all(())
        for root, owner in roots_of(spots.parts):
            self.attributes[(root,)] = frozenset(vars(owner))
            self._look_at_classes((root,), owner, 0)
        self._look_at_all(())

    def look(self, place: Place, value: Any) -> None:
        """Look at one more value, which the frames of the loop do not show."""
        self._look_at_all([(place, value)])

    def _look_at_all(self, named: Iterable[tuple[Place, Any]]) -> None:
        self._ahead.extend((place, value, 0) for place, value in named)
        while self._ahead and len(self.found) < _MOST:
            self._look(*self._ahead.popleft())
        for place, value, _ in self._ahead:
            self._look_at_whole(place, value)
        self._ahead.clear()

    def _look_later(self, place: Place, value: Any, depth: int) -> None:
        if place in self._rebound:
            self._postponed.append((place, value, depth))
        elif depth <= _DEEPEST:
            self._ahead.append((place, value, depth))
        else:
            self._look_at_whole(place, value)

    def _look_at_whole(self, place: Place, value: Any) -> None:
        """Mark a value beyond those that are looked at one by one."""
        if kind_of(value) != "opaque" and id(value) not in self._seen and not self._is_foreign(value):
            self.found[place] = self._mark.whole(value)

    def _look(self, place: Place, value: Any, depth: int) -> None:
        kind = "object" if self._looks_into(value) else kind_of(value)
        if kind in ("object", "opaque"):
            self._look_at_names(_module_of(value), depth)
        if isinstance(value, type) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._look_into_class(place, value, depth)
        is_known = isinstance(value, torch.Tensor) or is_container(value) or has_position(value)
        if kind == "opaque" and is_known and not self._is_foreign(value):
            self.found[place] = self._mark.contents(value)
            return
        if kind == "opaque" and self._enters_data and isinstance(value, range):
            self.found[place] = value
            return
        if kind == "opaque":
            self._look_into_opaque(place, value, depth)
            return
        if self._is_foreign(value) and (kind not in HOLDERS or self._is_part(value)):
            return
        if isinstance(value, defaultdict):
            self._look_later((*place, ("attribute", "default_factory", "")), value.default_factory, depth + 1)
        if kind == "object":
            self.found[place] = self._mark.identity(value)
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.homes[id(value)] = place
                attributes = self._attributes_of(value)
                self.attributes[place] = frozenset(attributes)
                for name, one in list(attributes.items()):
                    self._look_later((*place, ("attribute", name, "")), one, depth + 1)
                self._look_at_classes(place, value, depth)
            return
        if kind in HOLDERS and holds_objects(value):
            if id(value) in self._seen:
                if len(place) > 1:  # code may not show that another one is assigned there
                    self.found[place] = self._mark.identity(value)
                return
            steps = _steps_to_members(kind, value) if len(value) <= _FEW else None
            if steps is None:
                self.found[place] = self._mark.whole(value)
                return
            self.found[place] = self._mark.members(value)
            self._seen.add(id(value))
            self.homes[id(value)] = place
            for step, one in steps:
                self._look_later((*place, step), one, depth + 1)
            return
        self.found[place] = self._mark.contents(value)

    def _look_into_opaque(self, place: Place, value: Any, depth: int) -> None:
        is_module = isinstance(value, (nn.Module, torch.optim.Optimizer))
        # Other objects are not asked for a name: they may answer with code of their own.
        is_named = isinstance(value, _NAMED) and name_of_callable(value) is not None
        if len(place) > 1 and not is_module and (is_user_type(type(value)) or is_named):
            self.found[place] = self._mark.identity(value)
        if id(value) in self._seen:
            return
        if is_module:
            for there, hook in hooks_of(place, value):
                self._look_later(there, hook, depth + 1)
        if isinstance(value, torch.optim.Optimizer):
            self._seen.add(id(value))
            self.attributes[place] = frozenset(vars(value))
            for step, one in _attributes_of(value):
                if is_added(value, step[1]):
                    self._look_later((*place, step), one, depth + 1)
            return
        if self._is_foreign(value):
            return
        self._seen.add(id(value))
        if has_fingerprint(value):
            self.fingerprinted[place] = value
        if (spot := contents_of(value)) is not None:
            contents, there = spot.get(), (*place, CONTENTS)
            if kind_of(contents) == "opaque":
                self.found[there] = self._mark.identity(contents)
            self._look_later(there, contents, depth + 1)
        if self._enters_data and (isinstance(value, _OF_DATA) or is_loader(value)):
            for name, one in list(vars(value).items()):
                self.drawn |= {id(one)} if kind_of(one) == "generator" else set()
                if not name.startswith("_") or name in _OF_WRAPPERS:
                    self._look_later((*place, ("attribute", name, "")), one, depth + 1)
        for name in around_function(value):
            self._look_later((*place, ("attribute", name, "")), getattr(value, name), depth + 1)
        if isinstance(value, BOUND) and not isinstance(value.__self__, types.ModuleType):
            self._look_later((*place, ("attribute", "__self__", "")), value.__self__, depth + 1)
            value = getattr(value, "__func__", value)
        function = getattr(value, "__wrapped__", None) if type(value) is CACHED else value
        if isinstance(function, types.FunctionType) and is_script_file(function.__code__.co_filename):
            self.attributes[place] = frozenset(vars(value))
            for step, one in (*_attributes_of(value), *_inside_of(function)):
                self._look_later((*place, step), one, depth + 1)
        elif isinstance(value, nn.Module):
            is_own = is_user_type(type(value))
            # Of a library's module (a metric), what may be sums and lists of values.
            for name, one in list(vars(value).items()):
                is_shown = name[0] != "_" or (is_own and uses_itself(value, name))
                if is_shown and (is_own or isinstance(one, _SUMS)):
                    self._look_later((*place, ("attribute", name, "")), one, depth + 1)
            self._look_at_classes(place, value, depth)
            self._look_into_module(place, value)

    def _look_at_classes(self, place: Place, value: Any, depth: int) -> None:
        """The user's classes of an object, which may have no name: a function of the script has made them."""
        there = (*place, ("attribute", "__class__", ""), ("attribute", "__mro__", ""))
        for number, kind in enumerate(type(value).__mro__):
            if is_user_type(kind) and id(kind) not in self._seen:
                self._look_later((*there, ("item", "int", str(number))), kind, depth + 1)

    def _look_into_class(self, place: Place, kind: type, depth: int) -> None:
        """The values of its attributes, if the class is the user's own; of an enumeration, of its members'."""
        if not is_user_type(kind):
            return
        if issubclass(kind, enum.Enum):
            self._look_at_enumeration(place, kind, depth)
            return
        self.attributes[place] = frozenset(vars(kind))
        for name, one in list(vars(kind).items()):
            if isinstance(one, (staticmethod, classmethod)) and has_fingerprint(one.__func__):
                self.fingerprinted[*place, ("attribute", name, "")] = one.__func__
            elif not name.startswith("__") or callable(one) or around_function(one):
                self._look_later((*place, ("attribute", name, "")), one, depth + 1)
        for name, part in vars(kind).get("__dataclass_fields__", {}).items():
            there = (*place, ("attribute", "__dataclass_fields__", ""), ("item", "str", name))
            self._look_later((*there, ("attribute", "default_factory", "")), part.default_factory, depth + 1)

    def _look_at_enumeration(self, place: Place, kind: type[enum.Enum], depth: int) -> None:
        """The attributes of an enumeration's members, and their values: lists, say."""
        for name, member in kind.__members__.items():
            there = (*place, ("attribute", "_member_map_", ""), ("item", "str", name))
            own = self._attributes_of(member)
            self.attributes[there] = frozenset(own)
            for attribute, one in own.items():
                if attribute not in _OF_MEMBERS:
                    self._look_later((*there, ("attribute", attribute, "")), one, depth + 1)

    def _look_at_names(self, module: Any, depth: int) -> None:
        """The names of a module that something here comes from, if it is the script's: code there may change them."""
        if module in self._modules_seen:
            return
        self._modules_seen.add(module)
        if module not in sys.modules or not is_script_module(module):
            return
        self.names[module] = frozenset(vars(sys.modules[module]))
        for name, value in list(vars(sys.modules[module]).items()):
            if not name.startswith("__"):
                self._look_later((("module", module, name),), value, depth + 1)

    def _look_into_module(self, place: Place, module: nn.Module) -> None:
        """Its tensors, also those of the modules in it that were not handed over."""
        for name, tensor in [*parameters_in(module).items(), *buffers_in(module).items()]:
            if tensor is not None and id(tensor) not in self._seen and not self._is_foreign(tensor):
                self._seen.add(id(tensor))
                there = (*place, ("attribute", name, ""))
                self.found[there] = self._mark.contents(tensor)
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


def _attributes_of(value: Any) -> Iterator[tuple[tuple[str, str, str], Any]]:
    for name, one in list(vars(value).items()):
        yield ("attribute", name, ""), one


def _inside_of(function: types.FunctionType) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """Defaults of a function, and the variables that it encloses."""
    for name, one in defaults_of(function).items():
        yield ("default", name, ""), one
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            yield ("cell", name, ""), cell.cell_contents


def _steps_to_members(kind: str, value: Any) -> list[tuple[tuple[str, str, str], Any]] | None:
    """Return members of a container, with the steps of places to them; None: some have a key that is no name."""
    if kind != "dict":
        return [(("item", "int", str(index)), one) for index, one in enumerate(members_in(kind, value))]
    found = [(step, one) for key, one in items_of(value) if (step := step_to_item(key)) is not None]
    return found if len(found) == len(value) else None


def _items(value: Any) -> Iterator[Any]:
    return itertools.islice(members_in(kind_of(value), value), _FEW)


def holds_objects(value: Any, depth: int = 2) -> bool:
    """Return whether a container, or containers in it, hold objects with attributes of their own."""
    for one in _items(value):
        kind = kind_of(one)
        if kind in ("object", "opaque"):
            return True
        if depth and kind in HOLDERS and holds_objects(one, depth - 1):
            return True
    return False
