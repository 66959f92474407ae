"""Copies of containers and objects: of the same classes, made without running any code of theirs."""

from collections import deque
from collections.abc import Callable
from typing import Any

from relight.training.state.values.kinds import (
    attributes_beside,
    attributes_of,
    factory_of,
    items_of,
    kind_of,
    made_of,
    members_in,
)
from relight.transfer.io.typed import filled


def rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a value like this one, each member of which is what `function` makes of it.

    Keys, and members of sets, stay as they are. A value that holds no others is returned itself.
    """
    kind = kind_of(value)
    if kind in ("list", "deque", "tuple"):
        size = value.maxlen if isinstance(value, deque) else None
        made = filled(type(value), [function(one) for one in members_in(kind, value)], size=size)
    elif kind == "set":
        made = filled(type(value), list(members_in(kind, value)))
    elif kind == "dict":
        pairs = [(key, function(one)) for key, one in items_of(value)]
        made = filled(type(value), pairs, factory=factory_of(value))
    elif kind == "object":
        made = made_of(type(value))
        for name, one in attributes_of(value).items():
            object.__setattr__(made, name, function(one))
        return made
    else:
        return value
    if beside := attributes_beside(value):
        vars(made).update({name: function(one) for name, one in beside.items()})
    return made
