"""Values that an undone step or a replacement cannot get back: cached results, orders of sets, new modules."""

import functools
import gc
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from relight.script_files import is_user_type
from relight.training.carried.finding.spots.files import Files
from relight.training.state.values.marks import Mark

_DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal uniform random choice choices shuffle sample "
    "bernoulli multinomial poisson gauss integers standard_normal permutation dropout kaiming_uniform_ "
    "kaiming_normal_ xavier_uniform_ xavier_normal_ normal_ uniform_ Linear Conv2d Embedding".split()
)
_ITERATES = "|".join(
    (
        r"\bfor\b[^\n]*\bin\s+(?:\w+\.)*{0}\b",
        r"\b(?:iter|list|tuple|sum|next|enumerate|zip|map)\(\s*(?:\w+\.)*{0}\b",
        r"\b{0}\.pop\(",
    )
)
_CACHED = (
    "{names}(): a cached function whose result depends on more than the values of its arguments: random numbers, or "
    "what steps change. It is not undone with a step, and a replacement computes it anew. Call it before the loop, or "
    "keep what it returns in a variable"
)
_MADE = "{names}: made by a step, and no module that another process imports. Make it before the loop"


class Unrepeatable:
    """Watches cached functions, modules and files from the beginning of the loop."""

    def __init__(self, names: Callable[[], Iterable[Mapping[str, Any]]], files: Files) -> None:
        """`names`: of the modules that the loop runs in."""
        self._names, self._files = names, files
        self._caches = Caches()
        self._modules = {*sys.modules}

    def begin(self, ignored: Collection[str]) -> None:
        """The loop is found. `ignored`: names of what no step depends on, as the script says."""
        self._caches = Caches(self._names())
        self._modules = {*sys.modules}
        self._files.begin(ignored)

    def doubt(self, changing: Collection[str]) -> str:
        """Return why equal bits cannot be vouched for, or "". `changing`: names that steps change."""
        if computed := Caches(self._names()).computed_since(self._caches, changing):
            return _CACHED.format(names="(), ".join(computed))
        new = sorted(name for name in {*sys.modules} - self._modules if "." not in name)
        if made := [name for name in new if _is_made(sys.modules[name])]:
            return _MADE.format(names=", ".join(made))
        return self._files.doubt()

    def forget_results(self) -> None:
        """Empty the caches that only a rehearsal has filled."""
        Caches(self._names()).forget_since(self._caches)


class Caches:
    """The cached functions (`functools.lru_cache`) among the names of modules, and in their classes."""

    def __init__(self, modules: Iterable[Mapping[str, Any]] = ()) -> None:
        kind = type(functools.lru_cache(len))
        members = [member for names in modules for member in _members_of(names)]
        self._found = {name: one for name, one in members if type(one) is kind}
        self._computed = {name: one.cache_info().misses for name, one in self._found.items()}

    def computed_since(self, earlier: "Caches", changing: Collection[str]) -> list[str]:
        """Names of those that have computed results since, which depend on more than the values of their arguments.

        `changing`: names of variables and attributes that steps change.
        """
        return sorted(
            name
            for name, one in self._found.items()
            if self._computed[name] > earlier._computed.get(name, 0)
            and (_names_in(one.__wrapped__) & (_DRAWS | set(changing)) or _has_changing_keys(one))
        )

    def forget_since(self, earlier: "Caches") -> None:
        """Empty those that were empty then: what a rehearsal has computed, a rank that began at that step has not."""
        for name, one in self._found.items():
            if self._computed[name] and not earlier._computed.get(name):
                one.cache_clear()


def _is_made(module: Any) -> bool:
    return getattr(module, "__spec__", None) is None and getattr(module, "__file__", None) is None


def _members_of(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, one in list(names.items()):
        yield name, one
        if isinstance(one, type) and is_user_type(one):
            yield from ((f"{name}.{inner}", getattr(value, "__func__", value)) for inner, value in vars(one).items())


def _names_in(function: Any, depth: int = 3) -> set[str]:
    """The names that a function's code has, and that of the functions which it calls by their names."""
    if not isinstance(function, FunctionType):
        return set()
    names = set(_names_of(function.__code__))
    called = [function.__globals__.get(name) for name in names] if depth else []
    return names.union(*(_names_in(one, depth - 1) for one in called if one is not function))


def _names_of(code: CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner)


def _has_changing_keys(cached: Any) -> bool:
    """Return whether it was called with a tensor, a module or an object, which is found by identity and may change."""
    results = [one for one in gc.get_referents(cached) if type(one) is dict and one is not vars(cached)]
    keys = [part for one in results for key in list(one) for part in (key if isinstance(key, (tuple, list)) else [key])]
    return any(isinstance(key, (torch.Tensor, nn.Module)) or is_user_type(type(key)) for key in keys)


def keeps_its_order(value: set[Any] | frozenset[Any]) -> bool:
    """Return whether a set that is made of the same members, one after the other, has them in the same order."""
    members = list(value)
    return list(set(members)) == members


def only_grows(before: Any, value: set[Any] | frozenset[Any]) -> bool:
    """True if nothing was taken from a set since it was remembered: where members are put follows from that too."""
    return not isinstance(before, Mark) or before.kind != "set" or all(one in value for one in before.saved)


def is_iterated(name: str, frames: Iterable[FrameType]) -> bool:
    """True if the scripts of these frames seem to iterate over a set of this name, and not only test membership."""
    return any(_is_iterated_in(frame.f_code.co_filename, name.rpartition(".")[2]) for frame in frames)


@functools.cache
def _is_iterated_in(file: str, name: str) -> bool:
    return re.search(_ITERATES.format(re.escape(name)), "".join(linecache.getlines(file))) is not None
