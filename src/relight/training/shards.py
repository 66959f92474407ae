"""The part of a divided state that a rank holds, and the batch that it computes on. Pure.

Ranks with the same key hold the same bits: a replacement is restored from those of its own key.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Cut:
    """One dimension of a device mesh along which a tensor is divided, and this rank's place on it."""

    dimension: str  # its name, or its number in a mesh without names
    coordinate: int
    size: int
    ranks: tuple[int, ...] = ()  # of the mesh, if it is not all ranks of the job

    def __str__(self) -> str:
        among = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.dimension} {self.coordinate + 1}/{self.size}{among}"


def shard_key(tensors: Iterable[Iterable[Cut]]) -> str:
    """Return the key of a rank whose tensors are cut like this; empty if none is: plain replication.

    A rank's part differs from another's if any of its tensors does, so every cut counts, of whichever tensor.
    """
    cuts = {cut for tensor in tensors for cut in tensor if cut.size > 1}
    return ", ".join(map(str, sorted(cuts)))


def batch_groups(sizes: Sequence[int], ranks: Sequence[int], together: Collection[int]) -> list[tuple[int, ...]]:
    """Return the ranks that compute on the same batch, in the order of the batches.

    Args:
        sizes: of the dimensions of the device mesh.
        ranks: in the mesh, the last dimension running fastest.
        together: dimensions along which one batch is computed by several ranks (tensor parallelism), not one by each.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in zip(ranks, itertools.product(*map(range, sizes)), strict=True):
        own = tuple(coordinate for dimension, coordinate in enumerate(place) if dimension not in together)
        groups.setdefault(own, []).append(rank)
    return [tuple(group) for group in groups.values()]
