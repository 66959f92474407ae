"""Changes one value of a message to one that programs tend to get wrong, and leaves the rest well-formed."""

import math
import random
from typing import Any

import msgspec

_NUMBERS = (-1, 0, 1, 2, 3, 99, 100, 101, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
_FRACTIONS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 5e-324)
_WORDS = ("", "w0", "w1", "w2", "w3", "node-0", "\x00", "\u202e", "a" * 300, "../../etc", "{}", "\ud7ff")
_BYTES = (b"", b"1", b"x" * 300, b"\xff\xfe")


def bend(payload: bytes, chance: random.Random) -> bytes | None:
    """The payload with one value changed; None if it is no msgpack."""
    try:
        tree = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    places = list(_places(tree))
    if not places:
        return None
    holder, key = chance.choice(places)
    if isinstance(holder, dict) and chance.random() < 0.05:
        del holder[key]
    else:
        holder[key] = _other(holder[key], chance)
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, UnicodeEncodeError):
        return None


def _places(tree: Any) -> Any:
    """Every value in it, as what holds it and the key."""
    keys: Any = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _other(value: Any, chance: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return chance.choice((*_NUMBERS, value + 1, value - 1))
        case float():
            return chance.choice(_FRACTIONS)
        case str():
            return chance.choice(_WORDS)
        case bytes():
            return chance.choice(_BYTES)
        case list() if value:
            return chance.choice(([], value * 2, value[1:]))
        case _:
            return chance.choice((None, 0, "", [], {}))
