"""The fallback tiers: what to go back to when some part of the state has no intact holder. Pure.

    replica on another device  ->  buddy memory  ->  checkpoint on disk  ->  the end of the job

The highest tier that holds *every* part at one version is taken, and all ranks go back to that version: the only
exception to the rule that no finished version is undone (I7). Everything follows from what the ranks report once they
are paused; nothing that was said before a failure counts.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from relight.core.protocol.commands import FallbackTier
from relight.core.protocol.events import Stopped
from relight.core.recovery.decision import Halt, decide, derived_ranks
from relight.core.recovery.shards import Shards, require_every_part


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """The reason to fall back, and the version that an unfinished fallback goes to; it outlives single attempts."""

    target: int = -1  # the version that all were ordered back to
    newest_finished: int = -1  # when the first of these orders was given
    differed_at: int = -1  # a version of which replicas held different bits, and no majority was right
    difference: str = ""  # between those replicas, in words

    @property
    def is_under_way(self) -> bool:
        """True if all were ordered back to a buddy's or a checkpoint's version, and have not resumed."""
        return self.target >= 0

    @property
    def distrusts(self) -> bool:
        """True if replicas are not trusted."""
        return self.differed_at >= 0


class FallbackPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks go back to `target`."""

    tier: FallbackTier
    target: int
    reason: str
    places: tuple[tuple[int, int], ...]  # by rank: whose memory it comes from, and whose snapshot that is
    targets: tuple[int, ...]  # ranks that copy from another rank

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks that others copy from."""
        return tuple(sorted({self.places[rank][0] for rank in self.targets}))


def plan_fallback(
    reason: str,
    reports: Sequence[Stopped],
    shards: Shards,
    at_most: int | None = None,
    trusted: int | None = None,
) -> FallbackPlan | None:
    """Return the highest fallback tier that holds every part of the state at one version; None: there is none.

    Args:
        reason: what the replicas lack.
        reports: of all ranks, in rank order, blank ones included.
        at_most: a version that an unfinished recovery has gone back to already: snapshots of newer ones are undone. A
            checkpoint may be newer: it is whole, and nothing is mixed with it.
        trusted: the newest version that may be gone back to on any tier.
    """
    found = newest_snapshots(reports, shards, min((v for v in (at_most, trusted) if v is not None), default=None))
    if found is not None:
        version, places = found
        targets = tuple(rank for rank, place in enumerate(places) if place != (rank, rank))
        return FallbackPlan(tier=FallbackTier.BUDDY, target=version, reason=reason, places=places, targets=targets)
    version = _newest_checkpoint(reports, trusted)
    if version < 0:
        return None
    readers = {key: ranks[0] for key, ranks in shards.groups().items()} if shards.divided else {"": reports[0].rank}
    places = tuple((readers[shards.key(report.rank)], -1) for report in reports)
    targets = tuple(rank for rank, (reader, _) in enumerate(places) if reader != rank)
    return FallbackPlan(tier=FallbackTier.CHECKPOINT, target=version, reason=reason, places=places, targets=targets)


def newest_to_trust(reports: Sequence[Stopped], differed_at: int) -> int | None:
    """The newest version that may be gone back to; None: any.

    Args:
        reports: of all ranks.
        differed_at: the version at which replicas were found to differ, or -1. What changed a bit may have struck at
            any time since they were last known to agree: only versions up to that are trusted, and never that version.
    """
    if differed_at < 0:
        return None
    return min(differed_at - 1, max((report.agreed for report in reports), default=-1))


def newest_snapshots(
    reports: Sequence[Stopped], shards: Shards, at_most: int | None = None
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """The newest version of which every rank's state is in some memory, and its places; None: there is none."""
    copies: dict[int, dict[int, int]] = {}  # by version: of which rank, in whose memory
    standing: set[int] = set()  # ranks that have gone back already, and stay as they are; they serve no snapshot
    for report in reports:
        if report.version == at_most and not report.blank and not report.torn:
            copies.setdefault(at_most, {})
            standing.add(report.rank)
        for snapshot in report.snapshots:
            if at_most is None or snapshot.version <= at_most:
                known = copies.setdefault(snapshot.version, {})
                if snapshot.rank not in known or snapshot.rank == report.rank:  # one's own needs no copy
                    known[snapshot.rank] = report.rank
    intact = [report for report in reports if not report.blank and not report.torn]
    derivable = bool(intact) and all(report.derivable for report in intact)
    for version in sorted(copies, reverse=True):
        there = standing if version == at_most else set[int]()
        places = _find(copies[version], there, len(reports), shards, derivable)
        if places is not None:
            return version, places
    return None


def worth_keeping(reports: Sequence[Stopped], shards: Shards) -> int:
    """The version whose snapshots must stay until a newer one is established; -1: there is none of every rank.

    The newest may lie, of some rank, in one memory only, since its buddy has yet to fetch it: the next death may take
    it. So it is one of which the fewest ranks are in that danger, and of those the newest.
    """
    holders: dict[int, dict[int, int]] = {}  # by version: of which rank, in how many memories
    for report in reports:
        for snapshot in report.snapshots:
            of_version = holders.setdefault(snapshot.version, {})
            of_version[snapshot.rank] = of_version.get(snapshot.rank, 0) + 1

    def danger(version: int) -> tuple[int, int]:
        return sum(holders[version].get(report.rank, 0) < 2 for report in reports), -version

    whole = [version for version in holders if newest_snapshots(_of_version(reports, version), shards) is not None]
    return min(whole, key=danger, default=-1)


def _of_version(reports: Sequence[Stopped], version: int) -> list[Stopped]:
    """The reports with snapshots of this version only."""
    return [
        msgspec.structs.replace(report, snapshots=tuple(s for s in report.snapshots if s.version == version))
        for report in reports
    ]


def _find(
    copies: Mapping[int, int], standing: Collection[int], world_size: int, shards: Shards, derivable: bool
) -> tuple[tuple[int, int], ...] | None:
    """Find each rank's state of one version. The snapshot of another holder of the same part will do if private state
    follows from rank and step."""
    by_part = {shards.key(rank): (holder, rank) for rank, holder in copies.items()}
    places = []
    for rank in range(world_size):
        if rank in standing:
            places.append((rank, rank))
        elif rank in copies:
            places.append((copies[rank], rank))
        elif derivable and shards.key(rank) in by_part:
            places.append(by_part[shards.key(rank)])
        else:
            return None
    return tuple(places)


def has_gone_back(reports: Sequence[Stopped], version: int) -> bool:
    """True if every rank that holds anything holds this version, and nothing of the next step: replicas that agree."""
    intact = [report for report in reports if not report.blank and not report.torn]
    return all(report.version == version and report.prepared != version for report in intact)


def _newest_checkpoint(reports: Sequence[Stopped], trusted: int | None) -> int:
    """The newest checkpoint that every rank can see; -1: there is none."""
    seen = [{v for v in report.checkpoints if trusted is None or v <= trusted} for report in reports]
    return max(set.intersection(*seen), default=-1) if seen else -1


class LastCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that the survivors of a job that must end can write."""

    target: int
    reason: str
    writers: tuple[tuple[str, int], ...]  # of each part of the state, an intact holder
    derived: tuple[int, ...]  # ranks of whose private state nothing is left, and which follows from rank and step


def last_checkpoint(
    reports: Sequence[Stopped], private_versions: Mapping[int, Collection[int]], shards: Shards, world_size: int
) -> LastCheckpoint | str:
    """The version that a job which must end can save, by the recovery rule; or in words why there is none.

    Args:
        reports: of those who hold state, in rank order.
        private_versions: as in `decide`, of all other ranks.
        shards: the part that each rank holds.
        world_size: ranks in the job.
    """
    derived = derived_ranks(reports, private_versions)
    known = {rank: versions for rank, versions in private_versions.items() if rank not in derived}
    decision = require_every_part(decide(reports, known, world_size), shards)
    if isinstance(decision, Halt):
        return decision.reason
    if not decision.target:
        return "no step was finished yet"
    writers: dict[str, int] = {}
    for report in reports:
        if not report.blank and not report.torn:
            writers.setdefault(shards.key(report.rank), report.rank)
    return LastCheckpoint(
        target=decision.target, reason=decision.reason, writers=tuple(writers.items()), derived=derived
    )
