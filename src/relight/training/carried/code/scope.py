"""Places where the names of a function live: its frame, the function around it, its module."""

import types
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from relight.training.carried.code.refs import UNKNOWN, Key, Place, Ref


class Scope:
    """The places where the names of one function live."""

    def __init__(self, code: CodeType, scope_globals: dict[str, Any], number: int) -> None:
        """`number`: of the frame, or of the call."""
        self.code = code
        self.number = number
        self.bound: dict[str, Ref] = {}  # parameters, variables of comprehensions
        self.aliases: dict[Key, Ref] = {}
        self.frame: FrameType | None = None
        self.values: dict[str, Any] = {}  # of the frame's locals
        self.function = Ref()  # of a call: what is called
        self.frames: Sequence[Scope] = ()  # those of the loop
        self._globals = scope_globals
        self._module = str(scope_globals.get("__name__", "__main__"))
        is_module = code.co_name == "<module>"
        self._locals = frozenset() if is_module else frozenset((*code.co_varnames, *code.co_cellvars))
        self._free = frozenset(code.co_freevars)
        self.cells = frozenset(code.co_cellvars) | self._free

    @classmethod
    def of_frame(cls, frame: FrameType, number: int) -> "Scope":
        scope = cls(frame.f_code, frame.f_globals, number)
        scope.frame = frame
        scope.values = dict(frame.f_locals)
        return scope

    def lookup(self, name: str) -> Ref:
        """The referent of `name`."""
        if name in self.bound:
            return self.bound[name]
        if name in self._free and self.frame is None:
            return self._of_closure(name)
        if name in self._locals or name in self._free:
            if self.frame is None:
                return self._with_alias(Ref(("temporary", self.number, name), self.values.get(name, UNKNOWN)))
            place: Place = (("frame", str(self.number), name),)
            return self._with_alias(Ref(("name", self.number, name), self.values.get(name, UNKNOWN), place))
        builtins = self._globals.get("__builtins__", {})
        known = builtins if isinstance(builtins, dict) else vars(builtins)
        if name not in self._globals and name in known:
            return Ref(None, known[name])
        value = self._globals.get(name, UNKNOWN)
        return self._with_alias(Ref(("global", self._module, name), value, (("module", self._module, name),)))

    def find(self, thing: Any) -> Ref:
        """A name of the loop's functions, or of the module, for an object that the code reaches in another way."""
        for scope in self.frames:
            for name, value in scope.values.items():
                if value is thing:
                    return scope.lookup(name)
        for name, value in self._globals.items():
            if value is thing:
                return Ref(("global", self._module, name), value, (("module", self._module, name),))
        return Ref(None, thing)

    def _with_alias(self, ref: Ref) -> Ref:
        alias = self.aliases.get(ref.key or ())
        if alias is None:
            return ref
        return Ref(ref.key, ref.value if alias.value is UNKNOWN else alias.value, ref.place, alias)

    def _of_closure(self, name: str) -> Ref:
        function = self.function.value
        if not isinstance(function, types.FunctionType):
            return Ref(("temporary", self.number, name))
        for scope in self.frames:
            if name in scope.cells and _shares_variables(scope.code, function):
                return scope.lookup(name)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        place = (*self.function.place, ("cell", name, "")) if self.function.place else None
        try:
            value = cells[name].cell_contents
        except (KeyError, ValueError):
            value = UNKNOWN
        if place is None and value is not UNKNOWN and (found := self.find(value)).place is not None:
            return found
        return Ref(("variable", id(cells.get(name)), name), value, place)


def _shares_variables(code: CodeType, function: types.FunctionType) -> bool:
    """Return whether the function was defined inside the code of a frame, or beside it in the same function."""
    inside, _, _ = function.__qualname__.rpartition(".<locals>.")
    beside, _, _ = code.co_qualname.rpartition(".<locals>.")
    return inside == code.co_qualname or inside.startswith(f"{code.co_qualname}.<locals>.") or inside == beside != ""
