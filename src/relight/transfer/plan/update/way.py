"""The way that buckets take on one host: copied through shared buffers, or lent where they lie. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Way(StrEnum):
    """The way of buckets from a source to the engines of its host."""

    COPIED = "copied"  # the source copies each into a shared buffer, and engines copy it out of there
    LENT = "lent"  # engines copy each from where the source holds it; the source only digests it
    ON_DEVICE = "on-device"  # as copied, but the buffer lies in the memory of the source's device


class WayChoice(NamedTuple):
    """A way, and the reason for it."""

    way: Way
    why: str


_REASONS = {
    Way.LENT: "every engine reads the weights where they lie, so the source copies nothing",
    Way.ON_DEVICE: "engines copy the weights from the source's device to theirs, and not through host memory",
}


def choose_way(offered: Way, why_not: str, members: Mapping[str, str]) -> WayChoice:
    """Take the way that the publisher offers if every engine can take it too. Otherwise copy through shared buffers.

    `why_not`: why the publisher offers nothing better than that. `members`: why each engine or other source cannot take
    what is offered; empty: it can.
    """
    if offered is Way.COPIED:
        return WayChoice(Way.COPIED, why_not)
    unable = [f"{name}: {why}" for name, why in sorted(members.items()) if why]
    if unable:
        others = f", and {len(unable) - 1} more" if len(unable) > 1 else ""
        return WayChoice(Way.COPIED, f"{unable[0]}{others}")
    return WayChoice(offered, _REASONS[offered])
