"""Two attempts of one script, step by step: where the first difference is, and what may have brought it about. Pure."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from relight.core.account.report import JobReport, RecoveryReport
from relight.wire.records.evidence import Operation, StepEvidence

Attempt = Mapping[tuple[int, int], StepEvidence]  # by step and rank: what counts in the end
MISSING = "(not there)"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One value that is not what it was in the undisturbed run."""

    name: str
    before: str  # undisturbed
    now: str


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a torch function that got, or gave, something else."""

    rank: int
    place: str  # of the script
    name: str
    what: str  # in words
    after: str = ""  # the place of the call before, which was the same


class RankDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One rank at the first step that differs."""

    rank: int
    process: str
    role: str  # "survivor" or "replacement since recovery 2", and whether it repeated this step
    state: tuple[Change, ...]
    flags: tuple[Change, ...]
    names: tuple[Change, ...]  # that were other already when the step began


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first step of a round that is not that of the undisturbed run."""

    step: int
    recovery: int  # the newest before it; 0: none, so it is no failure that made the difference
    ranks: tuple[RankDifference, ...]
    divergences: tuple[Divergence, ...] = ()  # the first of each rank, if the step was traced


def collect(evidence: Iterable[StepEvidence]) -> dict[tuple[int, int], StepEvidence]:
    """Return the last commit of each step and rank: a fallback tier undoes finished steps."""
    found: dict[tuple[int, int], StepEvidence] = {}
    for each in evidence:
        known = found.get((each.step, each.rank))
        if known is None or (each.generation, each.attempt) >= (known.generation, known.attempt):
            found[each.step, each.rank] = each
    return found


def first_difference(before: Attempt, now: Attempt, report: JobReport, steps: int, ranks: int) -> Difference | None:
    """None: every step of `now` left the same bits on every rank, and none is missing."""
    noise = _noise(before, now, report, ranks)
    for step in range(steps):
        changed = []
        for rank in range(ranks):
            a, b = before.get((step, rank)), now.get((step, rank))
            if a is None or b is None:
                continue
            if a.state != b.state:
                changed.append(rank)
        if changed:
            generation = max(now[step, rank].generation for rank in changed)
            before_it = [recovery for recovery in report.recoveries if recovery.generation <= generation]
            everyone = [rank for rank in range(ranks) if (step, rank) in before and (step, rank) in now]
            told = [_of_rank(before[step, rank], now[step, rank], before, now, before_it, noise) for rank in everyone]
            return Difference(step=step, recovery=before_it[-1].number if before_it else 0, ranks=tuple(told))
    return None


def compared(before: Attempt, now: Attempt, steps: int, ranks: int) -> int:
    """Count the steps that are there on every rank of both attempts."""
    everybody = [(step, rank) for step in range(steps) for rank in range(ranks)]
    return sum(all(key in before and key in now for key in everybody if key[0] == step) for step in range(steps))


def _of_rank(
    a: StepEvidence,
    b: StepEvidence,
    before: Attempt,
    now: Attempt,
    recoveries: Sequence[RecoveryReport],
    noise: frozenset[str],
) -> RankDifference:
    names = tuple(change for change in changes(a.names, b.names) if change.name not in noise)
    return RankDifference(
        rank=b.rank,
        process=b.process,
        role=_role(a, b, recoveries),
        state=tuple(changes(a.state, b.state)),
        flags=tuple(changes(a.flags, b.flags)) or _flags_before(before, now, a.step, b.rank),
        names=names,
    )


def _flags_before(before: Attempt, now: Attempt, step: int, rank: int) -> tuple[Change, ...]:
    """Return the settings that differed when the step before ended."""
    a, b = before.get((step - 1, rank)), now.get((step - 1, rank))
    return () if a is None or b is None else tuple(changes(a.flags, b.flags))


def _role(a: StepEvidence, b: StepEvidence, recoveries: Sequence[RecoveryReport]) -> str:
    repeated = ", repeated this step" if b.attempt > a.attempt else ""
    if b.process == a.process:
        return f"survivor{repeated}"
    took = [recovery.number for recovery in recoveries if b.rank in recovery.replaced]
    return f"replacement{f' since recovery {took[-1]}' if took else ''}{repeated}"


def _noise(before: Attempt, now: Attempt, report: JobReport, ranks: int) -> frozenset[str]:
    """Names that differ without any failure, such as a clock reading."""
    first = min((recovery.target_version for recovery in report.recoveries), default=1 << 62)
    found = set[str]()
    for rank in range(ranks):
        for step in range(first):
            a, b = before.get((step, rank)), now.get((step, rank))
            if a is None or b is None:
                break
            if a.process == b.process and b.attempt == a.attempt:
                found.update(change.name for change in changes(a.names, b.names))
    return frozenset(found)


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Changes in the order of `before`; new names come last."""
    names = [*before, *(name for name in now if name not in before)]
    pairs = [(name, before.get(name, MISSING), now.get(name, MISSING)) for name in names]
    return [Change(name=name, before=a, now=b) for name, a, b in pairs if a != b]


# --- operations ---------------------------------------------------------------------------------------------------
def first_divergence(rank: int, before: Sequence[Operation], now: Sequence[Operation]) -> Divergence | None:
    """The first call that is not the same; what it got is looked at before what it gave."""
    after = ""
    for a, b in zip(before, now, strict=False):
        if a != b:
            return Divergence(rank=rank, place=b.place, name=b.name, what=_describe(a, b), after=after)
        after = b.place
    if len(before) == len(now):
        return None
    left = (now if len(now) > len(before) else before)[min(len(before), len(now))]
    what = "was called, and was not in the undisturbed run" if len(now) > len(before) else "was not called"
    return Divergence(rank=rank, place=left.place, name=left.name, what=what, after=after)


def _describe(a: Operation, b: Operation) -> str:
    if (a.place, a.name) != (b.place, b.name):
        return f"was called where the undisturbed run called {a.name} at {a.place}"
    for number, (one, other) in enumerate(zip(a.given, b.given, strict=False), 1):
        if one != other:
            return f"got {other} instead of {one} as value {number}"
    if len(a.given) != len(b.given):
        return f"got {len(b.given)} values instead of {len(a.given)}"
    return f"gave {b.result or 'nothing'} instead of {a.result or 'nothing'} for the same values"
