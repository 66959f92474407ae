"""A collective between two steps that a recovery cuts: ranks wait in it for a replacement, or go on alone.

Code between two steps cannot be repeated, but a replacement can run it, if all others still wait in the same collective
of it: they give it the results of earlier ones. Where ranks go on alone instead, each has its own value of the
collective, and the state that the code has left may differ by rank. A rank that has reached its next step has completed
all of these collectives, so its state is that of an undisturbed run. Pure.
"""

from collections.abc import Collection, Sequence

import msgspec

from relight.core.protocol.events import Stopped
from relight.core.recovery.decision import Decision, Halt
from relight.core.recovery.shards import Shards


def where_all_meet(decision: Decision, reports: Sequence[Stopped], gone_on: bool) -> int:
    """Return the number of the collective between two steps in which all ranks can meet; 0: there is none.

    Some wait there, or all come to the first one, if that code calls any.

    Args:
        decision: of the rule that knows nothing of this.
        reports: those it rests on.
        gone_on: a lost rank had completed that code, so that its replacement must not run it again.
    """
    held = [report for report in reports if report.rank not in decision.targets]  # targets run all of that code
    waiting = [report for report in held if report.rank not in decision.finishers]
    numbers = {report.at_collective if report.version == decision.target else 0 for report in waiting}
    if gone_on or len(numbers) > 1:
        return 0
    number = numbers.pop() if numbers else int(all(report.comes for report in held))
    return 0 if number > 1 and decision.finishers else number  # finishers have completed none


def all_have_run(decision: Decision, reports: Sequence[Stopped], gone_on: bool) -> bool:
    """Return whether a replacement can run the code before the target version with results that all others have.

    They have run that code to its end. Ranks that are to finish the step run it after that: only if it calls no
    collective, since none of theirs has a result. Args: see `where_all_meet`.
    """
    later = {*decision.targets, *decision.finishers}
    held = [report for report in reports if report.rank not in later]
    given = {report.gives if report.version == decision.target else -1 for report in held}
    number = given.pop() if len(given) == 1 else -1
    return not gone_on and (number == 0 if decision.finishers else number >= 0)


def follow_one(
    decision: Decision | Halt, reports: Sequence[Stopped], copies: Collection[int], shards: Shards, *, differ: bool
) -> Decision | Halt:
    """Have all copies come from ranks that did not go on alone, or else from one rank for each part of the state.

    Args:
        decision: of the rule that knows nothing of this.
        reports: those it rests on.
        copies: ranks that got their state in an attempt before this one, perhaps from a rank that is not followed now.
        shards: the part that each rank holds.
        differ: their states are known to differ, so ranks that are not followed copy as well. If they are alike, as
            after code that only prints the value, each keeps its own.
    """
    alone = {report.rank for report in reports if report.alone}
    if isinstance(decision, Halt) or not alone:
        return decision
    # Who finishes the step only now comes to that code later, and goes on alone there as well.
    unsure = alone | set(copies) | set(decision.finishers)
    parts: dict[str, list[int]] = {}
    for rank in decision.sources:
        parts.setdefault(shards.key(rank), []).append(rank)
    followed: list[int] = []
    for ranks in parts.values():
        sure = [rank for rank in ranks if rank not in unsure]
        own = [rank for rank in ranks if rank not in copies]
        followed += sure or own[:1] or ranks[:1]
    left = set(decision.sources) - set(followed)
    reason = f"{decision.reason}; a collective between two steps was cut short, and their states differ"
    return msgspec.structs.replace(
        decision,
        sources=tuple(sorted(followed)),
        targets=tuple(sorted({*decision.targets, *left})) if differ else decision.targets,
        reason=reason if differ else decision.reason,
    )
