"""Values that an undone step or a replacement cannot get back: draws kept by `functools.lru_cache`, orders of sets."""

import functools
import linecache
import re
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from relight.training.carried.values.values import Mark

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


def drawing_caches(modules: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often cached functions that draw random numbers, in these modules' names, have been computed."""
    kind = type(functools.lru_cache(len))
    found = [(name, one) for names in modules for name, one in list(names.items()) if type(one) is kind]
    return {name: one.cache_info().misses for name, one in found if _draws(one.__wrapped__)}


def _draws(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and bool(_DRAWS & {*code.co_names})


def keeps_its_order(value: set[Any] | frozenset[Any]) -> bool:
    """Whether a set that is made of the same members, one after the other, has them in the same order."""
    members = list(value)
    return list(set(members)) == members


def only_grows(before: Any, value: set[Any] | frozenset[Any]) -> bool:
    """Whether nothing was taken from a set since it was remembered: where members are put follows from that too."""
    return not isinstance(before, Mark) or before.kind != "set" or all(one in value for one in before.saved)


def is_iterated(name: str, frames: Iterable[FrameType]) -> bool:
    """Whether the scripts of these frames seem to iterate over a set of this name, and not only test membership."""
    return any(_is_iterated_in(frame.f_code.co_filename, name.rpartition(".")[2]) for frame in frames)


@functools.cache
def _is_iterated_in(file: str, name: str) -> bool:
    return re.search(_ITERATES.format(re.escape(name)), "".join(linecache.getlines(file))) is not None
