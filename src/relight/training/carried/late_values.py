"""Values that code changes after they were kept at the barrier, as a replacement can take them from another rank.

A rank that is lost after its barrier leaves what it kept there: code that ran since then, in the rest of the block or
between two steps, had not changed it yet. A rank that serves its state has run that code. Where both had kept equal
values at the barrier (a learning rate that is halved by hand, the epochs without progress), the replacement takes what
the other rank has now. That is right if the code does the same on all ranks, which is not known: the bits stay doubted.
Of values that differ (a timer's beginning), it takes what is alike in them, and that they were ended (`None`): code
that expects that would fail again and again.
"""

from collections.abc import Mapping
from typing import Any

from relight.training.carried.finding.kept import Kept
from relight.training.carried.finding.spots.files import ASKED_FOR_KEY
from relight.training.carried.finding.spots.spot import MISSING
from relight.training.carried.values.parts import Parts
from relight.training.carried.values.trees.alone import refers, written_alone
from relight.training.carried.values.trees.words import MISSING_TREE, TAG
from relight.training.state.values.late import changed_likewise
from relight.transfer.io.codec import decode_tree, encode_tree

MOST_BYTES = 2**20  # of all values that are offered


def offered(
    kept: Mapping[str, Any] | None, places: Mapping[str, Kept], parts: Parts, again: Mapping[str, Any] | None = None
) -> bytes:
    """Return values that code may have changed since they were kept: as they were then, and as they are now.

    Args:
        kept: what this rank carries, as it was kept at the barrier.
        places: where these values are, by their keys.
        parts: of the state. A value that holds one is not offered.
        again: the same as `kept`, as the loop has asked for the step after it, if that step was undone since then. The
            places have what code after that block expects, and not these values.
    """
    if not kept:
        return b""
    found, left = dict[str, list[bytes]](), MOST_BYTES
    for key in dict.fromkeys((*kept["unsettled"], *kept["lacking"])):
        one = places.get(key)
        if (
            one is None
            or key == ASKED_FOR_KEY
            or not one.is_written
            or key not in kept["names"]
            or refers(before := kept["names"][key], to_parts=True)
        ):
            continue
        now = _written_now(one, parts) if again is None else _of_its_own(again["names"].get(key, MISSING_TREE))
        if refers(now, to_parts=True):
            continue
        pair = [_bytes_of(before), _bytes_of(now)]
        if (size := sum(map(len, pair))) <= left:
            found[key], left = pair, left - size
    return encode_tree(found, "late values") if found else b""


def taken(own: Mapping[str, Any] | None, other: bytes) -> dict[str, Any]:
    """Return trees of another rank's values of now, by their keys, where it had kept the same as this rank."""
    if not own or not other:
        return {}
    names = own["names"]
    found = {key: now for key, (before, now) in _offered_of(own, other).items() if _bytes_of(names[key]) == before}
    return {key: decode_tree(now)["v"] for key, now in found.items()}


def taken_in_part(own: Mapping[str, Any] | None, other: bytes) -> dict[str, Any]:
    """Return trees of this rank's values, where another had kept others, with what code has changed there since."""
    if not own or not other:
        return {}
    found: dict[str, Any] = {}
    for key, pair in _offered_of(own, other).items():
        kept, (before, now) = own["names"][key], (decode_tree(data)["v"] for data in pair)
        if not refers(kept, to_parts=True) and _bytes_of(kept) != pair[0]:
            tree = changed_likewise(kept, before, now)
            found.update({key: tree} if _bytes_of(tree) != _bytes_of(kept) else {})
    return found


def _offered_of(own: Mapping[str, Any], other: bytes) -> dict[str, list[bytes]]:
    """Return what another rank offers of values that this rank lacks, since code may have changed them."""
    lacks = {*own["unsettled"], *own["lacking"]} & own["names"].keys()
    return {key: pair for key, pair in decode_tree(other).items() if key in lacks}


def _written_now(one: Kept, parts: Parts) -> Any:
    value = one.spot.get()
    return MISSING_TREE if value is MISSING else written_alone(value, parts)


def _of_its_own(tree: Any) -> Any:
    """Return the tree of a value, also if that was written down as another object than the one it was first."""
    return tree["v"] if isinstance(tree, dict) and tree.get(TAG) == "new" else tree


def _bytes_of(tree: Any) -> bytes:
    return encode_tree({"v": tree}, "a late value")
