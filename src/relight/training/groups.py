"""Which process groups a job has, seen from whichever rank this process holds. Pure.

c10d has every rank call `new_group` for every group, whether it is a member or not, so each process knows them all. So
does a standby, which does not know yet whose place it will take: its k-th group is whatever the k-th group of its rank
is, and changes its members with it.
"""

from collections.abc import Sequence

import xxhash

Ranks = Sequence[int]  # the members of a group, in their order; a `range` for all ranks


class GroupTable:
    """The groups that the script has made, in the order of making; the default group is the first."""

    def __init__(self, world_size: int) -> None:
        self.everyone = range(world_size)
        self._made: list[Ranks] = [self.everyone]
        self._partial = False  # some group was made by its members alone

    def add(self, ranks: Sequence[int], *, members_only: bool = False) -> None:
        """One more; `members_only` if other ranks do not hear of it."""
        self._made.append(self.normal(ranks))
        self._partial = self._partial or members_only

    def normal(self, ranks: Sequence[int]) -> Ranks:
        """Groups with the same members in the same order are equal, and share one connection."""
        return self.everyone if list(ranks) in ([], list(self.everyone)) else tuple(ranks)

    def of(self, rank: int) -> list[Ranks]:
        """The groups that `rank` is in."""
        return [ranks for ranks in self._made if rank in ranks]

    def to_form(self, rank: int) -> list[Ranks]:
        """Those that `rank` has connections for, in an order in which all ranks can form theirs one after the other."""
        return list(dict.fromkeys(self.of(rank)))

    def obstacle(self) -> str:
        """Why a replacement could not take every rank's place, or an empty string."""
        if self._partial:
            return (
                "a process group was made with use_local_synchronization=True: other ranks do not know of it, so no "
                "replacement could take a member's place. Leave the flag out, or use init_device_mesh"
            )
        first = [len(ranks) for ranks in self.of(0)]
        for rank in self.everyone:
            sizes = [len(ranks) for ranks in self.of(rank)]
            if sizes != first:
                return (
                    f"rank 0 is in process groups of {_listed(first)} ranks, rank {rank} in groups of "
                    f"{_listed(sizes)}: a replacement must be able to take any rank's place, so every rank must be in "
                    "as many groups of the same sizes, made in the same order. init_device_mesh makes them so"
                )
        return ""


def group_name(ranks: Ranks) -> str:
    """Under which members find each other: the same on all of them, whatever c10d calls the group."""
    if isinstance(ranks, range):
        return "default"
    listed = "-".join(map(str, ranks))
    return listed if len(listed) <= 40 else f"{len(ranks)}-{xxhash.xxh3_64_hexdigest(listed.encode())}"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
