"""Iterators and generators that a script keeps: how far each has come, as values that can be compared.

None can be put back: what one has given is gone.
"""

import itertools
from types import GeneratorType
from typing import Any

from relight.script_files import is_script_file

_EMPTY: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), set(), range(0), "", b"")
_BUILT_IN: frozenset[type] = frozenset(
    {
        *(type(iter(one)) for one in _EMPTY),
        type(reversed([])),
        zip,
        map,
        filter,
        itertools.cycle,
        itertools.repeat,
        itertools.chain,
        itertools.islice,
        itertools.accumulate,
        itertools.product,
        itertools.permutations,
        itertools.combinations,
        itertools.zip_longest,
        itertools.starmap,
        itertools.takewhile,
        itertools.dropwhile,
    }
)


def has_position(value: Any) -> bool:
    """Return whether it can be seen how far this has come. A generator that runs is one around the loop."""
    if type(value) is GeneratorType:
        return not value.gi_running and is_script_file(value.gi_code.co_filename)
    return type(value) in _BUILT_IN


def position_of(value: Any) -> list[Any]:
    """Return what tells how far this has come; empty: nothing does."""
    if type(value) is GeneratorType:
        frame = value.gi_frame
        return [] if frame is None else [frame.f_lasti, dict(frame.f_locals)]
    try:
        return list(value.__reduce__()[1:])
    except TypeError:  # of a newer Python
        return []
