"""Changes of a value by code on one rank, for another rank that has kept another value and lacks that change."""

from typing import Any

from relight.transfer.io.codec import encode_tree

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict})


def changed_likewise(own: Any, before: Any, now: Any) -> Any:
    """Return `own` with what code changed from `before` to `now` on another rank, all of them trees for `encode_tree`.

    A part that both ranks had alike becomes what it is there. One that differed stays: the other rank's is its own.
    But where it was only ended there (None, zero, a flag, an empty container), it is ended here as well: a timer
    that has been stopped, a section that was closed.
    """
    if _is_same(own, before):
        return now
    if _is_same(before, now):
        return own
    if type(own) is type(before) is type(now) is dict:
        return _changed_dict(own, before, now)
    if type(own) is type(before) is type(now) and type(own) in (list, tuple) and len(own) == len(before) == len(now):
        return type(own)(map(changed_likewise, own, before, now))
    is_ended = now is True or (type(now) in _PLAIN and not now)
    return now if is_ended else own


def _changed_dict(own: dict[Any, Any], before: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key in {**own, **now}:
        if key not in before:
            found[key] = own[key] if key in own else now[key]
        elif key in own and key in now:
            found[key] = changed_likewise(own[key], before[key], now[key])
    return found


def _is_same(left: Any, right: Any) -> bool:
    """Return whether they are equal in all bits."""
    return encode_tree({"v": left}, "a value") == encode_tree({"v": right}, "a value")
