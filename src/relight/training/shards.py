"""Which part of the state a rank holds, from the placements of the state itself. Pure.

Ranks with the same key hold the same bits: a replacement is restored from those of its own key.
"""

from collections.abc import Iterable
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
    """The key of a rank whose tensors are cut like this; empty if none is: plain replication.

    A rank's part differs from another's if any of its tensors does, so every cut counts, of whichever tensor.
    """
    cuts = {cut for tensor in tensors for cut in tensor if cut.size > 1}
    return ", ".join(map(str, sorted(cuts)))
