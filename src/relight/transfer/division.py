"""Weights that no process holds alone: which parts there are, and who holds each. Pure, without torch.

Each source says which bytes of which tensors it holds: boxes of the whole tensors, as parts. What the same sources
hold is one group; its parts travel together, and any of these sources can write them. See `manifest.Part`.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import msgspec

from relight.errors import UsageError
from relight.transfer.manifest import Manifest, Part
from relight.transfer.plan import Bucket, check_parts


class Division(msgspec.Struct, frozen=True):
    """How divided weights travel."""

    manifest: Manifest  # with parts
    holders: tuple[tuple[str, ...], ...]  # of each group

    def writers(self, buckets: Sequence[Bucket]) -> tuple[tuple[str, ...], ...]:
        """Who can write each bucket, the one who should first: the holders of a group take turns."""
        turns = [0] * len(self.holders)
        found = []
        for bucket in buckets:
            holders = self.holders[bucket.group]
            first = turns[bucket.group] % len(holders)
            turns[bucket.group] += 1
            found.append((*holders[first:], *holders[:first]))
        return tuple(found)


def parts_of(
    tensor: int, whole: Sequence[int], offset: Sequence[int], shape: Sequence[int], item_bytes: int
) -> tuple[Part, ...]:
    """The box of `shape` at `offset` of a tensor of the shape `whole`, in the order in which its bytes lie in memory.

    `tensor` is its index, `item_bytes` what one element takes. An empty box has no parts.
    """
    if 0 in shape:
        return ()
    # A dimension that the box has in full is one with the dimension before it; so only the first can be full.
    dimensions: list[tuple[int, int, int]] = []  # size of the whole, first, count
    for size, first, count in zip(whole, offset, shape, strict=True):
        if dimensions and count == size:
            size_before, first_before, count_before = dimensions.pop()
            dimensions.append((size_before * size, first_before * size, count_before * size))
        else:
            dimensions.append((size, first, count))
    if not dimensions or (len(dimensions) == 1 and dimensions[0][0] == dimensions[0][2]):
        nbytes = math.prod(whole) * item_bytes
        return (Part(tensor, 0, nbytes, nbytes, 1),)
    if len(dimensions) == 1:  # rows
        size, first, count = dimensions[0]
        return (Part(tensor, first * item_bytes, item_bytes, item_bytes, count),)
    columns, first_column, width = dimensions[-1]
    rows, first_row, height = dimensions[-2]
    stride = columns * item_bytes
    found = []
    for place in itertools.product(*(range(first, first + count) for _, first, count in dimensions[:-2])):
        index = 0
        for (size, _, _), coordinate in zip(dimensions[:-2], place, strict=True):
            index = index * size + coordinate
        start = (index * rows + first_row) * stride + first_column * item_bytes
        found.append(Part(tensor, start, width * item_bytes, stride, height))
    return tuple(found)


@functools.lru_cache(maxsize=2)  # the same weights go out again and again, and thousands of tensors take a while
def divide(manifest: Manifest, held: tuple[tuple[str, tuple[Part, ...]], ...]) -> Division:
    """Put together what sources hold: (name, parts) of each.

    Raises UsageError if that is not every byte of the manifest's tensors, once, or does not fit.
    """
    holders: dict[tuple[int, int, int, int, int], list[str]] = {}
    for name, parts in held:
        for part in parts:
            holders.setdefault((part.tensor, part.start, part.run, part.stride, part.count), []).append(name)
    groups: dict[tuple[str, ...], int] = {}
    found = []
    for place, names in sorted(holders.items()):
        group = groups.setdefault(tuple(names), len(groups))
        found.append(Part(*place, group))
    check_parts(manifest.entries, found)
    return Division(Manifest(manifest.entries, tuple(found)), tuple(groups))


class Holding:
    """Where in a source's own memory, in which its box of each tensor lies in one piece, a byte of a tensor lies."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """`parts` as `parts_of` gives them."""
        self._parts: dict[int, list[tuple[Part, int]]] = {}
        for part in parts:
            own = self._parts.setdefault(part.tensor, [])
            before = own[-1][1] + own[-1][0].nbytes if own else 0
            own.append((part, before))

    def find(self, tensor: int, start: int) -> int:
        """Byte `start` of the tensor. Raises UsageError if it is not held here."""
        for part, before in self._parts.get(tensor, ()):
            index, within = divmod(start - part.start, part.stride)
            if 0 <= index < part.count and within < part.run:
                return before + index * part.run + within
        raise UsageError(f"byte {start} of tensor {tensor} is not held here")
