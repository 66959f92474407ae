"""Values that are written down one by one: nothing in them may be an object that something else holds as well."""

from typing import Any

from relight.training.carried.values.homes import Homes
from relight.training.carried.values.parts import Parts
from relight.training.carried.values.trees.words import MISSING_TREE, TAG, Unsupported
from relight.training.carried.values.trees.writer import Writer

_REFERRING = frozenset({"missing", "same", "new", "home", "holder", "own", "shared", "view", "divided"})


def written_alone(value: Any, parts: Parts) -> Any:
    """Return the tree of a value; that of a place without one, if it cannot be written down."""
    try:
        return Writer(Homes(), parts).write("", value)
    except Unsupported:
        return MISSING_TREE


def refers(tree: Any, *, to_parts: bool = False) -> bool:
    """Return whether a tree lacks a value, or tells of an object outside of it, or of one several times.

    `to_parts`: parts of what was handed over count as such objects; each process has its own, of the same name.
    """
    if isinstance(tree, dict):
        tag = tree.get(TAG)
        inner = tree.values()
        return tag in _REFERRING or (to_parts and tag == "part") or any(refers(one, to_parts=to_parts) for one in inner)
    return isinstance(tree, (list, tuple)) and any(refers(one, to_parts=to_parts) for one in tree)
