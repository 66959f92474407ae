"""Sizes of values that are carried, and of the trees that they are written down as."""

from collections.abc import Iterator
from typing import Any

from relight.training.carried.values.parts import Parts, is_part
from relight.training.carried.values.trees.words import TAG
from relight.training.state.values.kinds import blocks_in, holds_words


def has_tensors(value: Any) -> bool:
    """Return whether it holds any, of more than one number."""
    return not holds_words(value) and any(tensor.dim() for tensor in blocks_in(value, ("tensor",)))


def tensor_bytes(value: Any, parts: Parts) -> int:
    """The size of its tensors, without parts of objects that were handed over."""
    return sum(tensor.nbytes for tensor in blocks_in(value, ("tensor",)) if not is_part(parts, tensor))


def keys_of(tree: Any) -> Iterator[int]:
    """The numbers by which dictionaries and sets in a tree find what they hold."""
    if isinstance(tree, dict):
        parts = tree.get("v")
        if tree.get(TAG) in ("dict", "set") and isinstance(parts, list):
            keys = [one[0] for one in parts] if tree[TAG] == "dict" else parts
            yield from (key for key in keys if type(key) is int)
        yield from keys_of(parts)
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from keys_of(one)


def size_of(tree: Any) -> int:
    """About how many bytes a tree takes."""
    if isinstance(tree, dict):
        return 32 + sum(16 + size_of(one) for one in tree.values())
    if isinstance(tree, (list, tuple)):
        return 8 + sum(map(size_of, tree))
    if isinstance(tree, (str, bytes)):
        return 8 + len(tree)
    return 16 + int(getattr(tree, "nbytes", 0))


def leaves_of(tree: Any) -> int:
    """Count the values that a tree holds."""
    if isinstance(tree, dict):
        return 1 if tree.get(TAG) == "part" else sum(map(leaves_of, tree.values()))
    return sum(map(leaves_of, tree)) if isinstance(tree, (list, tuple)) else 1
