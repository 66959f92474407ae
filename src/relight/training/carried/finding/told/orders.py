"""The order of a set: it depends on the members that the set once had, which another process has not seen."""

import functools
import linecache
import re
from collections.abc import Iterable
from types import FrameType
from typing import Any

from relight.training.state.values.marks import Mark

_ITERATES = "|".join(
    (
        r"\bfor\b[^\n]*\bin\s+(?:\w+\.)*{0}\b",
        r"\b(?:iter|list|tuple|sum|next|enumerate|zip|map)\(\s*(?:\w+\.)*{0}\b",
        r"\b{0}\.pop\(",
    )
)


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
