"""The places where a script keeps values: reading and setting them in the frames of the running loop."""

import ctypes
import enum
import functools
import itertools
import sys
import types
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FrameType
from typing import Any

from relight.training.carried.code.refs import OWNERS, Place
from relight.training.carried.finding.spots.outside import Settings, contents_of
from relight.training.carried.finding.spots.spot import (
    AROUND_FUNCTIONS,
    MISSING,
    AttributeSpot,
    CellSpot,
    DefaultSpot,
    DictSpot,
    FixedSpot,
    Spot,
    defaults_of,
)
from relight.training.carried.values.parts import NoParts, Parts
from relight.training.state.values.fingerprints import CACHED
from relight.training.state.values.kinds import attributes_of, can_be_carried, is_fixed, kind_of

_OPTIMIZED = 0x1  # of a code object: its locals are not a dict
_WRITES_THROUGH = sys.version_info >= (3, 13)
_SEPARATOR = "\x1f"
_FROM_OTHERS = "_inverted_"  # of a member of a Flag: `~member`, once that was asked for
_INTO_FUNCTIONS = ("cell", "default", "contents")
_OF_FUNCTIONS = {
    ("attribute", name)
    for name in ("__self__", "default_factory", *itertools.chain.from_iterable(AROUND_FUNCTIONS.values()))
}
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def key_of(place: Place) -> str:
    """A place as one string, the same in every process that runs the script."""
    return _SEPARATOR.join(part for step in place for part in step)


def place_of(key: str) -> Place:
    """The inverse of `key_of`."""
    parts = key.split(_SEPARATOR)
    return tuple(zip(parts[0::3], parts[1::3], parts[2::3], strict=True))


def step_to_item(key: Any) -> tuple[str, str, str] | None:
    """Return the step of a place to the item of a dict with this key; None: the key is another one in each process."""
    if type(key) in (int, str):
        return "item", type(key).__name__, str(key)
    return ("item", "enum", _name_of_member(key)) if isinstance(key, enum.Enum) else None


def _name_of_member(key: enum.Enum) -> str:
    return f"{type(key).__qualname__}.{key._name_}"


def _item(value: Any, kind: str, text: str) -> Spot | None:
    """Return the item of a dict or list to which a step leads."""
    if kind != "enum":
        return DictSpot(value, int(text) if kind == "int" else text)
    keys = (key for key in list(value) if isinstance(key, enum.Enum) and _name_of_member(key) == text)
    return DictSpot(value, found) if (found := next(keys, None)) is not None else None


def is_through_function(step: tuple[str, str, str]) -> bool:
    """Return whether a step of a place leads into a function, or the like."""
    return step[0] in _INTO_FUNCTIONS or step[:2] in _OF_FUNCTIONS


class Frames:
    """The frames of a running loop, from the one with the block to the one with the loop, or that of epochs."""

    def __init__(
        self, frames: Sequence[FrameType | None], declared: Sequence[Any] = (), held: Sequence[Any] = ()
    ) -> None:
        """None: a function that the loop calls anew in each turn, and that does not run now.

        `declared`: objects that the user named. `held`: objects that such functions get in each turn.
        """
        self.frames = frames
        self.held = held
        self._read: dict[int, dict[str, Any]] = {}
        self.declared = declared

    def read(self, number: int) -> dict[str, Any]:
        """The locals of one frame, as they are now. Ask `forget` to have them read again."""
        known = self._read.get(number)
        if known is None:
            frame = self.frames[number]
            known = self._read[number] = locals_of(frame) if frame is not None else {}
        return known

    def forget(self) -> None:
        self._read.clear()

    def place_of_name(self, text: str) -> Place:
        """A name as the function with the loop sees it, with attributes after dots."""
        first, *rest = text.split(".")
        root: Place = (("module", self.names(0)[0], first),)
        for number, frame in enumerate(self.frames):
            if frame is not None and not self.names(number)[2] and first in _variables(frame.f_code):
                root = (("frame", str(number), first),)
                break
        return (*root, *(("attribute", name, "") for name in rest))

    def have(self, name: str) -> bool:
        """Return whether a function of the loop uses this name."""
        codes = [frame.f_code for frame in self.frames if frame is not None]
        return any(name in (*_variables(code), *code.co_names) for code in codes)

    def names(self, number: int) -> tuple[str, dict[str, Any], bool]:
        """The module of one frame, its names, and whether the frame is the module's own."""
        frame = self.frames[number] or self._loop
        name = str(frame.f_globals.get("__name__", "__main__"))
        return name, frame.f_globals, frame.f_code.co_name == "<module>"

    def module(self, name: str) -> dict[str, Any] | None:
        """The names of a module."""
        for frame in self.frames:
            if frame is not None and frame.f_globals.get("__name__") == name:
                return frame.f_globals
        module = sys.modules.get(name)
        return vars(module) if module is not None else None

    @property
    def _loop(self) -> FrameType:
        return next(frame for frame in self.frames if frame is not None)

    def set(self, number: int, name: str, value: Any) -> None:
        """Give a local of a running function another value."""
        self._read.pop(number, None)
        if (frame := self.frames[number]) is not None:
            set_local(frame, name, value)


def set_local(frame: FrameType, name: str, value: Any) -> None:
    """Give a local of a running function another value; `MISSING`: none."""
    if not frame.f_code.co_flags & _OPTIMIZED or _WRITES_THROUGH:
        if value is MISSING:
            frame.f_locals.pop(name, None)
        else:
            frame.f_locals[name] = value
        return
    names = frame.f_locals
    if value is MISSING:
        names.pop(name, None)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(1))
    else:
        names.clear()
        names[name] = value
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    names.clear()


def _variables(code: CodeType) -> tuple[str, ...]:
    return (*code.co_varnames, *code.co_cellvars, *code.co_freevars)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the locals of a running function that have a value, and hold none of them."""
    names = frame.f_locals
    if not frame.f_code.co_flags & _OPTIMIZED or _WRITES_THROUGH:
        return dict(names)
    found = dict(names)
    names.clear()  # or what it names would live until it is filled again
    return found


class FrameSpot(Spot):
    """A local of one of the loop's frames. `frames` is another object in every step."""

    def __init__(self, owner: "Spots", number: int, name: str) -> None:
        self._owner, self._number, self._name = owner, number, name

    def get(self) -> Any:
        return self._owner.frames.read(self._number).get(self._name, MISSING)

    def set(self, value: Any) -> None:
        self._owner.frames.set(self._number, self._name, value)


class Spots:
    """Finds places in the frames of the present step."""

    def __init__(self, parts: Parts | None = None) -> None:
        self.frames = Frames(())
        self.parts = parts or NoParts()
        self.data: Any = None  # that was handed over
        self.settings = Settings()
        self.shown: dict[str, Any] = {}  # objects of the script's that an integration holds
        self.keepers: dict[int, Callable[[str, Any], bool]] = {}  # by `id`: which attributes are kept otherwise

    def names_of_modules(self) -> list[dict[str, Any]]:
        """Names of the modules of the loop's functions."""
        return [self.frames.names(number)[1] for number, frame in enumerate(self.frames.frames) if frame is not None]

    def show(self, name: str, thing: Any, keeps: Callable[[str, Any], bool], *, of_library: bool = False) -> bool:
        """Look into an object as if a variable of the script held it, less attributes that are kept otherwise.

        Of a function, what it encloses is looked into. Returns whether it is an object of a class of the script's own,
        or with `of_library` of any class: nothing is carried of others, and of a library's only what can be carried.
        """
        if isinstance(thing, _FUNCTIONS):
            self.shown[name] = thing
        if kind_of(thing) != "object" and not (of_library and hasattr(thing, "__dict__")):
            return False
        self.shown[name] = thing
        is_own = kind_of(thing) == "object"
        self.keepers[id(thing)] = keeps if is_own else lambda name, one: keeps(name, one) or not can_be_carried(one)
        return True

    def look_into(self, thing: Any, kept: Collection[str]) -> None:
        """Look into an object that was handed over where variables lead to it, less attributes that it keeps itself."""
        self.keepers[id(thing)] = lambda name, _: name in kept

    def looks_into(self, thing: Any) -> bool:
        """Return whether the attributes of an object are looked at one by one."""
        return id(thing) in self.keepers or kind_of(thing) == "object"

    def own_attributes(self, thing: Any) -> dict[str, Any]:
        """The attributes of an object, less those that are kept otherwise."""
        attributes = dict(vars(thing)) if isinstance(thing, type) else attributes_of(thing)
        if isinstance(thing, enum.Enum):
            attributes = {name: value for name, value in attributes.items() if name != _FROM_OTHERS}
        keeps = self.keepers.get(id(thing))
        if keeps is None:
            return attributes
        return {name: value for name, value in attributes.items() if not keeps(name, value)}

    def is_kept_otherwise(self, place: Place) -> bool:
        """Return whether an attribute on the way to a place is one that `show` was told is kept otherwise."""
        for length in range(1, len(place) if self.keepers else 0):
            (kind, name, _), holder = place[length], self.find(place[:length])
            keeps = self.keepers.get(id(holder.get())) if kind == "attribute" and holder is not None else None
            spot = self.find(place[: length + 1]) if keeps is not None else None
            if keeps is not None and spot is not None and keeps(name, spot.get()):
                return True
        return False

    def find(self, place: Place) -> Spot | None:
        """None if something on the way to it is not there."""
        (kind, first, name), *rest = place
        spot: Spot
        if kind == "frame":
            spot = FrameSpot(self, int(first), name)
        elif kind == "declared":
            spot = FixedSpot(self.frames.declared[int(first)])
        elif kind == "data":
            spot = FixedSpot(self.data)
        elif kind == "shown":
            if name not in self.shown:
                return None
            spot = FixedSpot(self.shown[name])
        elif kind == "setting":
            spot = self.settings.spots[name]
        elif kind == "held":
            if int(first) >= len(self.frames.held):
                return None
            spot = FixedSpot(self.frames.held[int(first)])
        elif kind in OWNERS:
            try:
                spot = FixedSpot(self.parts.at((OWNERS[kind], first, name)))
            except LookupError:
                return None
        else:
            names = self.frames.module(name if kind == "file" else first)
            if names is None:
                return None
            spot = DictSpot(names, name)
        for step in rest:
            value = spot.get()
            if value is MISSING:
                return None
            found = _next(value, *step)
            if found is None:
                return None
            spot = found
        return spot


def _next(value: Any, kind: str, first: str, second: str) -> Spot | None:
    if kind == "attribute":
        return AttributeSpot(value, first)
    if kind == "contents":
        return contents_of(value)
    if kind == "item":
        return _item(value, first, second)
    if kind == "member":  # of a dictionary whose keys are others in each process
        members = list(value.values())
        return FixedSpot(members[int(first)]) if int(first) < len(members) else None
    function = value
    while hasattr(function, "func") and not isinstance(function, types.FunctionType):
        function = function.func  # functools.partial
    if isinstance(function, types.MethodType):
        function = function.__func__
    if type(function) is CACHED:
        function = getattr(function, "__wrapped__", None)
    if not isinstance(function, types.FunctionType):
        return None
    while first not in function.__code__.co_freevars and isinstance(
        inner := getattr(function, "__wrapped__", None), types.FunctionType
    ):
        function = inner  # what a decorator wraps: torch.no_grad()
    if kind == "cell":
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        return CellSpot(cells[first]) if first in cells else None
    return DefaultSpot(function, first) if first in defaults_of(function) else None


def leads_into_function(spots: Spots, place: Place, begin: int) -> bool:
    """Return whether a function, or the like, lies between the first `begin` steps of a place and what is there.

    What hangs on a function is not carried with what holds the function.
    """
    if any(map(is_through_function, place[begin:])):
        return True
    holders = [place[:length] for length in range(begin, len(place)) if place[length][0] == "attribute"]
    return any(is_fixed(spot.get()) for spot in map(spots.find, holders) if spot is not None)
