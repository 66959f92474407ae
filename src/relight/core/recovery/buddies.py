"""The placement of buddies: each rank keeps another one's snapshots in its host memory. Pure.

Each rank has one buddy and is the buddy of one, so that every host needs the same memory. A buddy is of use when all
who hold a part of the state are lost and it is not: so it must not hold that part itself, and should be on another
host.
"""

from collections.abc import Sequence
from itertools import chain, product

# Turns that are tried. With ranks laid out host by host the first few that are worth a look include the best.
_TRIES = 64


def choose_buddies(keys: Sequence[str], hosts: Sequence[str]) -> tuple[int, ...]:
    """For each rank, the rank that keeps its snapshots.

    Ranks stand in a circle, host by host, and each has as its buddy the one that is so many places on. A turn by the
    size of the largest host is the first that can leave no two of one host together (if none has more than half of all
    ranks). Where each host holds all parts in the same order, such a turn meets the same part, so a second circle has
    each host turned by one against the one before. The turn with the fewest pairs of the same part, then of the same
    host, wins; of several the first.

    Args:
        keys: the part of the state that each rank holds.
        hosts: of each rank.

    Returns:
        By rank; empty if no rank has another one that holds another part.
    """
    count = len(keys)
    if len(set(keys)) < 2:
        return ()
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    straight = list(chain(*by_host.values()))
    skewed = list(chain(*(_turned(ranks, number) for number, ranks in enumerate(by_host.values()))))
    largest = max(map(len, by_host.values()))
    turns = dict.fromkeys(turn % count for first in (1, largest) for turn in range(first, first + _TRIES))
    best, fewest = list[int](), (count + 1, 0)
    for circle, turn in product((straight, skewed), (turn for turn in turns if turn)):
        buddies = _turned(circle, turn)
        useless = sum(keys[rank] == keys[buddy] for rank, buddy in zip(circle, buddies, strict=True))
        near = sum(hosts[rank] == hosts[buddy] for rank, buddy in zip(circle, buddies, strict=True))
        if (useless, near) < fewest:
            fewest = (useless, near)
            best = [buddy for _, buddy in sorted(zip(circle, buddies, strict=True))]
        if fewest == (0, 0):
            break
    return tuple(best)


def _turned(ranks: list[int], places: int) -> list[int]:
    first = places % len(ranks)
    return [*ranks[first:], *ranks[:first]]
