"""A look at everything that a running script can reach, to see by values what its code did not show."""

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from relight.training.carried.places import Frames
from relight.training.carried.refs import Place, is_user_type
from relight.training.carried.source import is_user_file
from relight.training.carried.values import Mark, attributes_of, kind_of, remember

_DEEPEST = 4
_MOST = 5000  # places
_LONGEST = 5000  # items of one container
_FEW = 64  # items of a container that is looked into one by one
_BYTES = 4 * 2**20  # of a larger tensor its version tells


class Survey:
    """What is at each place now, with marks by which changes are seen."""

    def __init__(self, frames: Frames, is_foreign: Callable[[Any], bool]) -> None:
        self._is_foreign = is_foreign
        self._seen: set[int] = set()
        self.found: dict[Place, Any] = {}
        modules: dict[str, dict[str, Any]] = {}
        for number in range(len(frames.frames)):
            if frames.frames[number] is None:
                continue
            name, names, is_module = frames.names(number)
            modules.setdefault(name, names)
            if not is_module:
                for local, value in frames.read(number).items():
                    self._look((("frame", str(number), local),), value, 0)
        for name, names in modules.items():
            for one, value in list(names.items()):
                if not one.startswith("__"):
                    self._look((("module", name, one),), value, 0)

    def _look(self, place: Place, value: Any, depth: int) -> None:
        if len(self.found) >= _MOST or depth > _DEEPEST:
            return
        kind = kind_of(value)
        if kind == "opaque":
            self._look_into_opaque(place, value, depth)
            return
        if self._is_foreign(value):
            return
        if kind == "object":
            if id(value) not in self._seen:
                self._seen.add(id(value))
                for name, one in attributes_of(value).items():
                    self._look((*place, ("attribute", name, "")), one, depth + 1)
            return
        if kind in ("list", "tuple", "dict", "deque") and any(_is_object(one) for one in _items(value)):
            if id(value) in self._seen or len(value) > _FEW:
                return
            self._seen.add(id(value))
            pairs = value.items() if kind == "dict" else enumerate(value)
            for key, one in pairs:
                if type(key) in (int, str):
                    step = ("item", type(key).__name__, str(key))
                    self._look((*place, step), one, depth + 1)
            return
        self.found[place] = glance(value)

    def _look_into_opaque(self, place: Place, value: Any, depth: int) -> None:
        if id(value) in self._seen or self._is_foreign(value):
            return
        self._seen.add(id(value))
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, types.FunctionType) and is_user_file(value.__code__.co_filename):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            for name, cell in cells:
                try:
                    self._look((*place, ("cell", name, "")), cell.cell_contents, depth + 1)
                except ValueError:
                    continue
        elif isinstance(value, nn.Module) and is_user_type(type(value)):
            for name, one in vars(value).items():
                if not name.startswith("_"):
                    self._look((*place, ("attribute", name, "")), one, depth + 1)


def _items(value: Any) -> Iterator[Any]:
    return iter(list(value.values())[:_FEW] if isinstance(value, dict) else list(value)[:_FEW])


def _is_object(value: Any) -> bool:
    return kind_of(value) in ("object", "opaque")


def glance(value: Any) -> Any:
    """A mark that tells whether the value changes, and puts it back unless it is large."""
    kind = kind_of(value)
    if kind == "tensor" and (value.layout is not torch.strided or value.nbytes > _BYTES):
        return Mark("version", value, None if value.is_inference() else value._version)
    if kind == "array" and value.nbytes > _BYTES:
        return Mark("version", value, None)
    if kind in ("list", "tuple", "dict", "set", "deque") and len(value) > _LONGEST:
        return Mark("length", value, len(value))
    return remember(value)
