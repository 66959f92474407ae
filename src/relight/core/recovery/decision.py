"""The recovery rule: forward or back, from what the survivors report after Stop. A pure function of those facts.

It is variant A18 of docs/PROTOCOL.md, the one that held in every state searched: *forward if and only if every
intact survivor is prepared for the step or already past it; otherwise back*, in which case no rank can have finished
the step: what was written before its barrier is undone. FlashRecovery's published rule (section 3.3) decides from the
failed rank's tag and diverges, because an all-reduce can complete on some survivors and fail on others.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from relight.core.protocol.events import Stopped


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Reach `target` by finishing on `finishers` and copying onto `targets` from `sources`."""

    target: int
    direction: str  # "forward", "back" or "as they are"
    reason: str
    sources: tuple[int, ...]
    finishers: tuple[int, ...]
    targets: tuple[int, ...]
    recalled: tuple[int, ...] = ()  # targets that get what their own rank once held, and no copy of another's
    runs_code: bool = False  # as in Restore
    meets_at: int = 0  # the same
    given: tuple[int, ...] = ()  # the same


def describe_target(direction: str, target: int) -> str:
    """Describe the version that all ranks go to."""
    return f"all were at version {target}" if direction == "as they are" else f"{direction} to version {target}"


class Halt(msgspec.Struct, frozen=True, kw_only=True):
    """No target keeps the promise; the job ends and says why, unless a fallback tier has what is `lost`."""

    reason: str
    lost: bool = True  # False: an invariant is broken, so no other state can be trusted either


def decide(
    reports: Sequence[Stopped], private_versions: Mapping[int, Collection[int]], world_size: int
) -> Decision | Halt:
    """Choose the version at which everyone resumes.

    Args:
        reports: one per rank that lives, survivors and replacements alike, collected after Stop.
        private_versions: for each rank whose process died, the versions for which its rank-private state
            (random streams, unsynchronized buffers, data position) is still held by its agent.
        world_size: ranks in the job.
    """
    intact = sorted((r for r in reports if not r.blank and not r.torn), key=lambda r: r.rank)
    if not intact:
        return Halt(reason=f"no intact replica is left ({_count_lost(reports, world_size)})")
    base = min(r.version for r in intact)
    ahead = tuple(r.rank for r in intact if r.version == base + 1)
    prepared = tuple(r.rank for r in intact if r.version == base and r.prepared == base)
    unprepared = tuple(r.rank for r in intact if r.version == base and r.prepared != base)
    if contradiction := _contradiction(intact, base, ahead, unprepared):
        return Halt(reason=contradiction, lost=False)
    missing = _lacking(private_versions, base + 1)
    is_forward, reason = _choose(base, ahead, prepared, unprepared, missing)
    if is_forward and missing:
        return Halt(
            reason=f"{_ranks(ahead)} finished step {base}, but the private state of {_ranks(missing)} for "
            f"version {base + 1} is not held by any agent"
        )
    # A rank with neither version lost its page together with its agent: that it is missing proves nothing then.
    if not is_forward and (gone := _lacking(private_versions, base)):
        return Halt(
            reason=f"the private state of {_ranks(gone)} for version {base} (statistics of BatchNorm, a loader's "
            "position, per_rank objects) is held by no agent"
        )
    back = "back" if prepared or any(r.step >= base for r in intact) else "as they are"
    return Decision(
        target=base + is_forward,
        direction="forward" if is_forward else back,
        reason=reason,
        sources=tuple(r.rank for r in intact),
        finishers=prepared if is_forward else (),
        targets=tuple(sorted(set(range(world_size)) - {r.rank for r in intact})),
    )


def _lacking(private_versions: Mapping[int, Collection[int]], version: int) -> tuple[int, ...]:
    """Return the lost ranks whose private state for a version no agent holds."""
    return tuple(rank for rank, versions in sorted(private_versions.items()) if version not in versions)


def _choose(
    base: int, ahead: Sequence[int], prepared: Sequence[int], unprepared: Sequence[int], missing: Sequence[int]
) -> tuple[bool, str]:
    """Decide whether all go on to `base + 1`, with a reason. `missing`: lost ranks without private state for that."""
    if not ahead and not prepared:
        return False, f"no survivor was prepared for step {base}: no rank can have passed its barrier"
    if unprepared:
        return False, f"{_ranks(unprepared)} had not come to the barrier of step {base}: no rank passed it"
    if missing and not ahead:
        return (
            False,
            f"{_ranks(missing)} died without private state for version {base + 1}: no rank finished step {base}",
        )
    ready = f"{_ranks(ahead)} finished step {base} and the others" if ahead else "all survivors"
    return True, f"{ready} are prepared: they finish step {base} without another rank"


def derived_ranks(reports: Sequence[Stopped], private_versions: Mapping[int, Collection[int]]) -> tuple[int, ...]:
    """Lost ranks of whose private state nothing is left, not even the page: their host is gone.

    All ranks run the same script. If the private state of the intact ones is but a function of rank and step, so is
    that of the lost ones, for any version.
    """
    intact = [report for report in reports if not report.blank and not report.torn]
    if not all(report.derivable for report in intact):
        return ()
    return tuple(rank for rank, versions in sorted(private_versions.items()) if not versions)


def _contradiction(intact: Sequence[Stopped], base: int, ahead: Sequence[int], unprepared: Sequence[int]) -> str:
    """Describe a contradiction among intact survivors (invariants I1 and I6); an empty string: there is none."""
    lineages: dict[int, str] = {}
    for report in intact:
        if report.version > base + 1:
            return f"rank {report.rank} is at version {report.version} while another is at {base}"
        known = lineages.setdefault(report.version, report.lineage)
        if known != report.lineage:
            return f"rank {report.rank} reached version {report.version} by another history than its peers"
    if ahead and unprepared:
        return (
            f"{_ranks(ahead)} finished step {base} without {_ranks(unprepared)} being prepared for it: the "
            "barrier was passed without everyone, which must not happen"
        )
    return ""


def _count_lost(reports: Sequence[Stopped], world_size: int) -> str:
    torn = sum(r.torn for r in reports)
    causes = sorted({r.torn_by for r in reports if r.torn_by})
    lost = f"{world_size - len(reports)} dead, {torn} interrupted inside a write, {len(reports) - torn} blank"
    return f"{lost}: {causes[0]}" if causes else lost


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
