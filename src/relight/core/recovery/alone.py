"""A collective between two steps that a recovery cuts: ranks wait in it for a replacement, or go on alone.

Code between two steps cannot be repeated, but a replacement can run it, while the others wait in a collective of it:
they give it the results of earlier ones. Where ranks go on alone instead, each has its own value of the
collective, and the state that the code has left may differ by rank. A rank that has reached its next step has completed
all of these collectives, so its state is that of an undisturbed run. Pure.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from relight.core.protocol.events import Stopped
from relight.core.recovery.decision import Decision, Halt
from relight.core.recovery.shards import Shards


class Meeting(NamedTuple):
    """The place where a replacement that runs the code between two steps comes to the other ranks."""

    at: int  # the number of the collective in which they wait; 0: they have run all of that code
    given: tuple[int, ...]  # ranks that lack results of collectives before it
    sources: tuple[int, ...]  # ranks that have the results of all before it


def where_all_meet(decision: Decision, reports: Sequence[Stopped], gone_on: bool) -> Meeting | None:
    """Return where all ranks can meet, if a replacement runs the code before the target version; None: nowhere.

    In the collective of the highest number in which a rank waits, or in the next step, if a rank has run that code to
    its end. Ranks that have completed fewer collectives (a broadcast ends on its source first) are given the results
    that they lack, and so are those that are to finish the step, and come to that code only then. If no rank has begun
    it, all come to its first collective, if it calls any.

    Args:
        decision: of the rule that knows nothing of this.
        reports: those it rests on.
        gone_on: a lost rank had completed that code, so that its replacement must not run it again.
    """
    later = {*decision.targets, *decision.finishers}  # these run all of that code
    begun = [report for report in reports if report.rank not in later]
    ended = [report for report in begun if not report.at_collective]
    if gone_on or any(report.version != decision.target for report in begun):
        return None
    number = max((report.at_collective for report in begun), default=0)
    if not begun:
        comes = all(report.comes for report in reports if report.rank not in decision.targets)
        return Meeting(1, (), decision.sources) if comes else None
    if ended:
        results = {report.gives for report in ended}
        if len(results) > 1 or max(results) < number:  # they differ, or are not known
            return None
        at, completed = 0, results.pop()
    else:
        at, completed = number, number - 1
    lacking = [report.rank for report in begun if 0 < report.at_collective <= completed]
    lacking += decision.finishers if completed else ()
    sources = tuple(report.rank for report in begun if report.rank not in lacking)
    return Meeting(at, tuple(sorted(lacking)), sources)


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
