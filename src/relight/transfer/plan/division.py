"""Weights that no process holds alone: which parts there are, and who holds each. Pure, without torch.

Each source says which tensors it knows, and which bytes of these it holds: boxes of the whole tensors, as parts. What
the same sources hold is one group; its parts travel together, and any of these sources can write them. See
`manifest.Part`. Ranks of a pipeline know the tensors of their own stages; what engines get are those of all stages.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from relight.errors import MissingPartsError, UsageError
from relight.transfer.plan.manifest import Entry, Manifest, Part
from relight.transfer.plan.plan import Bucket, Piece, check_parts


class ShardSpec(msgspec.Struct, frozen=True, array_like=True):
    """The parts that one source holds of weights that no source holds alone."""

    manifest: Manifest  # the tensors that it knows, and the parts of them that it holds
    stages: tuple[int, ...] = ()  # of a pipeline: those whose tensors it knows
    all_stages: int = 0  # how many there are; 0: there is no pipeline, and every source knows all tensors


class Division(msgspec.Struct, frozen=True):
    """The way divided weights travel."""

    manifest: Manifest  # of the tensors of all sources, with parts
    holders: tuple[tuple[str, ...], ...]  # of each group

    def writers(self, buckets: Sequence[Bucket]) -> tuple[tuple[str, ...], ...]:
        """Return the sources that can write each bucket, the preferred one first: the holders of a group take turns."""
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


def divide(held: Sequence[tuple[str, ShardSpec]]) -> Division:
    """Put together what sources hold, each by its name. The tensors of the first source come first.

    Raises MissingPartsError if that is not every byte of every tensor of all stages, and UsageError if it does not fit.
    """
    entries = _entries_of_all(held)
    holders: dict[tuple[int, int, int, int, int], list[str]] = {}
    for name, own in held:
        indices = find_entries(own.manifest, entries)
        for part in own.manifest.parts:
            place = (indices[part.tensor], part.start, part.run, part.stride, part.count)
            holders.setdefault(place, []).append(name)
    groups: dict[tuple[str, ...], int] = {}
    found = []
    for place, names in sorted(holders.items()):
        group = groups.setdefault(tuple(names), len(groups))
        found.append(Part(*place, group))
    check_parts(entries, found)
    return Division(Manifest(entries, tuple(found)), tuple(groups))


def _entries_of_all(held: Sequence[tuple[str, ShardSpec]]) -> tuple[Entry, ...]:
    first = held[0][1]
    if all(own.manifest.entries == first.manifest.entries and own.stages == first.stages for _, own in held):
        found = {entry.name: (entry, first.stages) for entry in first.manifest.entries}
    else:
        found = {}
        for name, own in held:
            for entry in own.manifest.entries:
                known, stages = found.setdefault(entry.name, (entry, own.stages))
                if stages != own.stages:
                    # Were they taken for one tensor, what engines get would depend on who was faster.
                    raise UsageError(
                        f"two stages of the pipeline have a tensor named {entry.name!r}: give engines a name for each, "
                        "training.publish(rename=...)"
                    )
                if known != entry:
                    raise UsageError(f"{name} describes {entry.name} in another way than other ranks")
    missing = set(range(first.all_stages)).difference(*(own.stages for _, own in held))
    if missing:
        raise MissingPartsError(f"stage {min(missing)} of the pipeline is held by no source")
    return tuple(entry for entry, _ in found.values())


def find_entries(own: Manifest, entries: Sequence[Entry]) -> Sequence[int]:
    """Find each tensor of a source among `entries`. Raises UsageError if one is not there, or is another."""
    if own.entries == entries[: len(own.entries)]:
        return range(len(own.entries))
    places = {entry: index for index, entry in enumerate(entries)}
    strange = next((entry.name for entry in own.entries if entry not in places), None)
    if strange is not None:
        raise UsageError(f"{strange} is not among the tensors of the update, or is another one there")
    return [places[entry] for entry in own.entries]


def as_known(bucket: Bucket, own: Mapping[int, int]) -> Bucket:
    """The bucket with the indices that its tensors have at one source. Raises UsageError if one has none."""
    if any(piece.tensor not in own for piece in bucket.pieces):
        raise UsageError(f"bucket {bucket.index} carries a tensor that is not held here")
    pieces = (Piece(own[p.tensor], p.start, p.offset, p.nbytes, p.run, p.stride) for p in bucket.pieces)
    return Bucket(bucket.index, bucket.nbytes, tuple(pieces), bucket.group)


class LocalOffsets:
    """Offsets of a tensor's bytes in a source's own memory, where its box of each tensor lies in one piece."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """`parts` as `parts_of` gives them."""
        self._parts: dict[int, list[tuple[Part, int]]] = {}
        for part in parts:
            own = self._parts.setdefault(part.tensor, [])
            before = own[-1][1] + own[-1][0].nbytes if own else 0
            own.append((part, before))

    def find(self, tensor: int, start: int) -> int:
        """Return the offset of byte `start` of the tensor. Raises UsageError if it is not held here."""
        for part, before in self._parts.get(tensor, ()):
            index, within = divmod(start - part.start, part.stride)
            if 0 <= index < part.count and within < part.run:
                return before + index * part.run + within
        raise UsageError(f"byte {start} of tensor {tensor} is not held here")
