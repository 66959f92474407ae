"""Functions that keep their results (`functools.lru_cache`): what an undone step has computed is computed anew."""

import gc
import re
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from relight.script_files import is_user_type
from relight.training.carried.code.source import source_of
from relight.training.state.values.fingerprints import results_in
from relight.training.state.values.kinds import kind_of

_DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like normal uniform random choice choices shuffle sample "
    "bernoulli multinomial poisson gauss integers standard_normal permutation dropout kaiming_uniform_ "
    "kaiming_normal_ xavier_uniform_ xavier_normal_ normal_ uniform_ Linear Conv2d Embedding".split()
)
_CHANGES = frozenset("list dict set deque object objects generator bytearray tensor array stream".split())
_CHANGED = (  # what follows an expression that is changed in place
    r"(?:\.\w+|\[[^\]\n]*\])*(?:(?:\.\w+|\[[^\]\n]*\])\s*(?:[-+*/%|&^]|\*\*|//)?=(?!=)"
    r"|\.(?:\w+_|append\w*|extend\w*|insert|add|update|set\w*|pop\w*|put|remove|discard|clear|sort|reverse)\()"
)
_UNMOVED = frozenset({"plain", "number", "tensor", "array"})  # results that may be computed again, as is assumed


class Caches:
    """Those that a script can reach, with the results that each had at a moment."""

    def __init__(self, found: Iterable[tuple[str, Any]] = ()) -> None:
        """`found`: cached functions, with their names."""
        self._functions = {id(one): (name, one) for name, one in found}
        self._misses = {number: one.cache_info().misses for number, (_, one) in self._functions.items()}
        self._keys = {number: {id(key) for key, _ in results_in(one)} for number, (_, one) in self._functions.items()}

    @property
    def have_grown(self) -> bool:
        """True if one has computed a result since."""
        return any(one.cache_info().misses != self._misses[number] for number, (_, one) in self._functions.items())

    def computed_since(self, earlier: "Caches", changing: Collection[str]) -> list[str]:
        """Names of those that have computed results since, which depend on more than the values of their arguments.

        `changing`: names of variables and attributes that steps change.
        """
        return sorted(
            name
            for name, one in self._new_since(earlier)
            if _names_in(getattr(one, "__wrapped__", None)) & (_DRAWS | set(changing)) or _has_changing_keys(one)
        )

    def changed_since(self, earlier: "Caches", script: Collection[str]) -> list[str]:
        """Names of those whose results, computed since, code of these modules seems to change in place."""
        return sorted(
            name
            for name, one in self._new_since(earlier)
            if any(kind_of(result) in _CHANGES for _, result in results_in(one))
            and any(
                is_changed_in_place(shown, script)
                for shown in {getattr(one, "__name__", name), *re.findall(r"\w+", name)[-1:]}
            )
        )

    def _new_since(self, earlier: "Caches") -> Iterator[tuple[str, Any]]:
        for number, named in self._functions.items():
            if self._misses[number] > earlier._misses.get(number, 0):
                yield named

    def forget_since(self, earlier: "Caches") -> list[str]:
        """Forget the results that were not there earlier: an undone step or a rehearsal has computed them.

        Returns the names of functions that keep such a result, which may be changed, beside older ones.
        """
        kept = []
        for number, (name, one) in self._functions.items():
            before = earlier._keys.get(number, set())
            new = [(key, result) for key, result in results_in(one) if id(key) not in before]
            if not new:
                continue
            if one.cache_info().maxsize is None:
                table = _table_of(one)
                for key, _ in new:
                    del table[key]
            elif all(kind_of(result) in _UNMOVED for key, result in results_in(one) if id(key) in before):
                one.cache_clear()
            elif any(kind_of(result) not in ("plain", "number") for _, result in new):
                kept.append(name)
        return kept


def is_changed_in_place(name: str, script: Collection[str]) -> bool:
    """Return whether these modules change what a call of this name returns, or a variable that is set to that."""
    call = rf"\b{name}\([^()]*\)"
    names = re.findall(rf"\b(\w+)\s*(?::[^=\n]*)?=\s*(?:\w+\.)*{name}\(", source_of(script))
    return any(re.search(one + _CHANGED, source_of(script)) for one in (call, *(rf"\b{each}\b" for each in names)))


def _table_of(cached: Any) -> dict[Any, Any]:
    """The results of a function that keeps all of them, by their keys."""
    return next(one for one in gc.get_referents(cached) if type(one) is dict and one is not vars(cached))


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
    keys = [part for key, _ in results_in(cached) for part in (key if isinstance(key, (tuple, list)) else [key])]
    return any(isinstance(key, (torch.Tensor, nn.Module)) or is_user_type(type(key)) for key in keys)
