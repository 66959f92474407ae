"""The ranks that hold each part of the state; what follows for a decision, and for what a job survives. Pure.

Ranks with the same *shard key* hold the same bits. Under plain replication all keys are empty. Everything here is asked
of the keys alone: how a script divides its state (FSDP2, tensor parallelism, ...) makes no difference.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from relight.core.recovery.decision import Decision, Halt

_Digest = TypeVar("_Digest", str, int, int | str)


class Shards:
    """The part of the state that each rank holds. It belongs to the rank for the whole job, not to its process."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """`keys[rank]` is the key of each rank; none at all means plain replication."""
        self._keys = tuple(keys) if any(keys) else ()
        self._holders: dict[str, tuple[int, ...]] = {}
        for rank, key in enumerate(self._keys):
            self._holders[key] = (*self._holders.get(key, ()), rank)

    @property
    def divided(self) -> bool:
        """True if ranks hold different parts."""
        return len(self._holders) > 1

    def key(self, rank: int) -> str:
        return self._keys[rank] if self._keys else ""

    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """The holders of each part, in rank order; parts in the order of their first holders. Only if `divided`."""
        return self._holders

    def digest(self, digests: Sequence[str]) -> str:
        """One digest for all of the state, from those of all ranks."""
        if not self.divided:
            return digests[0]
        parts = [f"{key} {digests[ranks[0]]}" for key, ranks in self._holders.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def differing(self, digests: Mapping[int, _Digest]) -> list[dict[int, _Digest]]:
        """The digests, by rank, of each part that is not the same on all of its holders."""
        parts: dict[str, dict[int, _Digest]] = {}
        for rank, digest in sorted(digests.items()):
            parts.setdefault(self.key(rank), {})[rank] = digest
        return [part for part in parts.values() if len(set(part.values())) > 1]

    def lacks(self, holders: Iterable[int]) -> bool:
        """Return whether some part of the state is held by none of `holders`."""
        if not self.divided:
            return not any(True for _ in holders)
        return len({self._keys[rank] for rank in holders}) < len(self._holders)

    def lost(self, holders: Collection[int]) -> str:
        """Name the parts that none of `holders` has; empty if they have all of the state."""
        held = {self.key(rank) for rank in holders}
        lost = [(key, ranks) for key, ranks in self._holders.items() if key not in held]
        if not lost:
            return ""
        named = [f"part {key} of the state, held by {_ranks(ranks)} only" for key, ranks in lost[:_MOST_NAMED]]
        more = f" and {len(lost) - _MOST_NAMED} other parts" if len(lost) > _MOST_NAMED else ""
        return f"{'; '.join(named)}{more}: every copy is lost"


_MOST_NAMED = 4


def require_every_part(decision: Decision | Halt, shards: Shards) -> Decision | Halt:
    """The decision, if each part of the state has an intact holder; else the end of the job, which says what is lost.

    The rule needs no change for divided state: it asks *every* intact survivor, of whatever part. Forward, all of them
    finish the step by themselves; back, none of them wrote. So its target can be reached for each part that has an
    intact holder, and a blank rank is restored from a holder of its own part: only such are left as sources.
    """
    if isinstance(decision, Halt) or not shards.divided:
        return decision
    lost = shards.lost(decision.sources)
    if lost:
        return Halt(reason=lost)
    if not decision.targets:
        return decision
    needed = {shards.key(rank) for rank in decision.targets}
    sources = tuple(rank for rank in decision.sources if shards.key(rank) in needed)
    return msgspec.structs.replace(decision, sources=sources)


def content_mismatch(shards: Shards, digests: Sequence[str]) -> tuple[int, int] | None:
    """Two ranks that hold the same part with different contents, by the digests of all ranks; None: there are none."""
    first: dict[str, int] = {}
    for rank, digest in enumerate(digests):
        other = first.setdefault(shards.key(rank), rank)
        if digest != digests[other]:
            return other, rank
    return None


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
