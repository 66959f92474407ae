"""Words of the trees as which values that are carried are written down, and of messages about such values."""

from typing import Any

TAG = "\x01"
MISSING_TREE = {TAG: "missing"}  # of a place that has no value


class Unsupported(Exception):
    """A value of a kind that cannot be written down. The message names the kind."""


def name_of(value: Any) -> str:
    """A value's kind, as a message names it."""
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def class_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"
