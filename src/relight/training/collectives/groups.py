"""The process groups of a job, seen from the rank that this process holds. Pure.

c10d has every rank call `new_group` for every group, whether it is a member or not, so each process knows them all. So
does a standby, which does not know yet whose place it will take. It holds all of them, and each becomes the group of
the ranks that it was made for, if the rank that the standby takes is one of them. A script may also have chosen a group
before, as the one that it is a member of; that one becomes the group which the rank has instead of it.
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
        # The script calls collectives on all groups, and relies on those being skipped that it is not a member of. Then
        # it has chosen none.
        self.skips = False

    def add(self, ranks: Sequence[int], *, members_only: bool = False) -> None:
        """Add a group; `members_only`: other ranks do not learn of it."""
        self._made.append(self.normal(ranks))
        self._partial = self._partial or members_only

    @property
    def newest(self) -> int:
        """The place of the group that was made last."""
        return len(self._made) - 1

    def acting(self, place: int, built_as: int, rank: int) -> Ranks:
        """Return the members of a group for a process that was built as one rank and holds another.

        `place` is the group's number; `rank`, which the process holds, need not be a member.
        """
        literal = self._made[place]
        if rank in literal or built_as not in literal or self.skips:
            return literal
        return self.of(rank)[self._number(place, built_as)]

    def _number(self, place: int, rank: int) -> int:
        """Count the groups of that rank that were made before the one at that place."""
        return sum(rank in ranks for ranks in self._made[:place])

    def normal(self, ranks: Sequence[int]) -> Ranks:
        """Groups with the same members in the same order are equal, and share one connection."""
        return self.everyone if list(ranks) in ([], list(self.everyone)) else tuple(ranks)

    def of(self, rank: int) -> list[Ranks]:
        """Return the groups that `rank` is in."""
        return [ranks for ranks in self._made if rank in ranks]

    def to_form(self, rank: int) -> list[Ranks]:
        """Return the groups that `rank` has connections for, in an order in which all ranks can form theirs."""
        return list(dict.fromkeys(self.of(rank)))

    def obstacle(self) -> str:
        """Return why a replacement could not take every rank's place, or an empty string."""
        if self._partial:
            return (
                "a process group was made with use_local_synchronization=True: other ranks do not know of it, so no "
                "replacement could take a member's place. Leave the flag out, or use init_device_mesh"
            )
        built_as = self.everyone[-1]
        own = [len(ranks) for ranks in self.of(built_as)]
        for rank in self.everyone:
            sizes = [len(ranks) for ranks in self.of(rank)]
            if sizes != own:
                return (
                    f"rank {rank} is in process groups of {_listed(sizes)} ranks, rank {built_as} in groups of "
                    f"{_listed(own)}: a standby is built before it knows its rank, and must be able to take any, so "
                    f"every rank must be in as many groups of the same sizes, made in the same order. {_INSTEAD}"
                )
        for place, ranks in enumerate(self._made):
            for rank in ranks if built_as in ranks else ():
                if self._number(place, rank) != self._number(place, built_as):
                    return (
                        f"the process group of ranks {_listed(ranks)} is number {self._number(place, built_as)} of "
                        f"those of rank {built_as}, and number {self._number(place, rank)} of those of rank {rank}: a "
                        "standby, which is built before it knows its rank, could not tell which of them the script "
                        f"means. {_INSTEAD}"
                    )
        return ""


_INSTEAD = (
    "init_device_mesh makes them so; or let standbys make groups when they have a rank: relight.init(late_standby=True)"
)


def group_name(ranks: Ranks) -> str:
    """Return the name by which members find each other: equal on all of them, whatever c10d calls the group."""
    if isinstance(ranks, range):
        return "default"
    listed = "-".join(map(str, ranks))
    return listed if len(listed) <= 40 else f"{len(ranks)}-{xxhash.xxh3_64_hexdigest(listed.encode())}"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
