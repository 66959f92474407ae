"""The way that buckets take on one host: copied through shared buffers, or lent where they lie. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Way(StrEnum):
    """How buckets get from a source to the engines of its host."""

    COPIED = "copied"  # the source copies each into a shared buffer, and engines copy it out of there
    LENT = "lent"  # engines copy each from where the source holds it; the source only digests it


class WayChoice(NamedTuple):
    """A way, and the reason for it."""

    way: Way
    why: str


def choose_way(unlendable: str, members: Mapping[str, str]) -> WayChoice:
    """Lend if the publisher can, and every engine reads what it lends: one copy less. Otherwise copy.

    `unlendable`: why the publisher cannot; empty: it can. `members`: the same of each engine and of other sources.
    """
    if unlendable:
        return WayChoice(Way.COPIED, unlendable)
    unable = [f"{name}: {why}" for name, why in sorted(members.items()) if why]
    if unable:
        others = f", and {len(unable) - 1} more" if len(unable) > 1 else ""
        return WayChoice(Way.COPIED, f"{unable[0]}{others}")
    return WayChoice(Way.LENT, "every engine reads the weights where they lie, so the source copies nothing")
